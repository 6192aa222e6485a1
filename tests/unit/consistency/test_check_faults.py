"""No wrong verdict is recorded, whatever happens at whichever moment of a check: the checker is killed, members or nodes fail, nodes
restart, the deployment is switched, memory is damaged, a reply is lost. Such a moment is before and after each call of members and nodes.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.agent_answers import AgentFault
from consistency.collect import Checker
from consistency.findings import CONSISTENT, DIVERGED, DigestPage, Limits, NodeVector
from consistency.recording import record
from consistency.vector import Words
from raftmeta.client import Page, Reply
from raftmeta.core.errors import RaftmetaError
from tests.support.fake_fleet import DEPLOYMENT, MODEL, FakeAgents, FakeFleet, weights

T = TypeVar("T")

KINDS = ("kill", "member", "node", "restart", "switch_begins", "switch", "damage", "moves")
MOMENTS = 60  # more than any check here has
PUBLISHED = {"v1": weights(1), "v2": weights(2)}


class Killed(BaseException):
    """The checker's process is gone; nothing of it runs any more."""


@dataclass
class World:
    """A fleet in which something happens at numbered moments."""

    damaged: tuple[str, ...] = ()
    faults: Mapping[int, str] = field(default_factory=dict)  # moment -> what happens then
    moment: int = 0
    dead: bool = False
    was_damaged: bool = False

    def __post_init__(self) -> None:
        self.fleet = FakeFleet(("a1",), ("b1", "b2"))
        self.fleet.publish("v2", copy.deepcopy(PUBLISHED["v2"]))
        self.now_damaged: set[str] = set()
        for name in self.damaged:
            self._damage(name)
        self.agents = FakeAgents(self.fleet)
        self.recorded: list[tuple[str, Mapping[str, Any]]] = []
        self.read_damaged: set[str] = set()  # nodes that were damaged when their memory was read

    async def at(self, where: str, call: Callable[[], Awaitable[T]]) -> T:
        """A call, with the moments before and after it."""
        self._pass(where)
        reply = await call()
        self._pass(where)
        return reply

    def _pass(self, where: str) -> None:
        if self.dead:
            raise Killed
        self.moment += 1
        match self.faults.get(self.moment, ""):
            case "kill":
                self.dead = True
                raise Killed
            case "member" if where == "member":
                raise RaftmetaError("no_quorum", "because")
            case "node" if where == "node":
                raise AgentFault("timed_out", "because")
            case "restart":
                self.fleet.nodes_by_name["b1"].boot_id += "+"
            case "switch_begins":
                self._order(activated=False)
                self._serve("a1", "v2")
            case "switch":
                self._order(activated=True)
                for name in self.fleet.nodes_by_name:
                    self._serve(name, "v2")
            case "damage":
                self._damage("b2")
            case "moves":
                self.fleet.deployments[DEPLOYMENT] |= {"standby": {"zone": "b", "nodes": ["b1"]}}
                self.fleet.revision += 1

    def _order(self, activated: bool) -> None:
        self.fleet.revision += 2
        revision = self.fleet.revision
        state = {"version": "v2", "previous": "v1", "rollout_id": "r2", "order_revision": revision - 1}
        self.fleet.rollouts["r2"] = {"to_version": "v2", "attestations": []}
        before = self.fleet.deployments[DEPLOYMENT]["activated_revision"]
        self.fleet.deployments[DEPLOYMENT] |= state | {"activated_revision": revision if activated else before}

    def _serve(self, name: str, label: str) -> None:
        node, version = self.fleet.nodes_by_name[name], self.fleet.versions[f"{MODEL}/{label}"]
        node.tensors, node.version, node.epoch = copy.deepcopy(PUBLISHED[label]), label, node.epoch + 1
        node.checksum, node.config_digest = version["checksum"], version["config_digest"]
        self.now_damaged.discard(name)

    def _damage(self, name: str) -> None:
        if name not in self.now_damaged:
            self.was_damaged = True
            self.now_damaged.add(name)
            self.fleet.nodes_by_name[name].damage("norm", 0)

    # Members.

    async def list_deployments(self, page: Page, /) -> Reply:
        return await self.at("member", lambda: self.fleet.list_deployments(page))

    async def get_version(self, model: str, label: str, /) -> Reply:
        return await self.at("member", lambda: self.fleet.get_version(model, label))

    async def get_manifest(self, model: str, label: str, /) -> Reply:
        return await self.at("member", lambda: self.fleet.get_manifest(model, label))

    async def get_rollout(self, rollout_id: str, /) -> Reply:
        return await self.at("member", lambda: self.fleet.get_rollout(rollout_id))

    async def nodes(self) -> Reply:
        return await self.at("member", self.fleet.nodes)

    async def record_verdicts(self, items: Sequence[Mapping[str, Any]], /) -> Reply:
        """Takes, as members do, no verdict of an order that is not the current one."""
        (item,) = items
        verdict, report = item["verdict"], item["report"]

        async def take() -> Reply:
            state = self.fleet.deployments[item["deployment"]]
            if (report["order_revision"], report["version"]) != (state["order_revision"], state["version"]):
                refused = {"revision": self.fleet.revision, "code": "verdict_outdated", "detail": "another order"}
                return Reply({"items": [refused]}, status=200, revision=self.fleet.revision, generation=self.fleet.generation)
            if verdict == CONSISTENT:
                assert {*state["primary"]["nodes"], *state["standby"]["nodes"]} <= {node["node"] for node in report["nodes"]}
            self.recorded.append((verdict, report))
            return await self.fleet.record_verdicts(items)

        return await self.at("member", take)

    # Nodes.

    async def vectors(self, url: str, deployments: Sequence[str], max_age_ms: int | None) -> dict[str, NodeVector | AgentFault]:
        async def read() -> dict[str, NodeVector | AgentFault]:
            self.read_damaged |= {url.removeprefix("http://")} & self.now_damaged
            return await self.agents.vectors(url, deployments, max_age_ms)

        return await self.at("node", read)

    async def vector(self, url: str, deployment: str, entries: bool) -> NodeVector:
        return await self.at("node", lambda: self.agents.vector(url, deployment, entries))

    async def blocks(self, url: str, deployment: str, tensor: str, size_bytes: int, published: bool = False) -> Words:
        return await self.at("node", lambda: self.agents.blocks(url, deployment, tensor, size_bytes, published))

    async def digests(self, url: str, deployment: str, after: str) -> DigestPage:
        return await self.at("node", lambda: self.agents.digests(url, deployment, after))

    # The check.

    def check(self, deep: bool = False, quorum: str = "all") -> None:
        async def work() -> None:
            verdicts = await Checker(self, self, Limits(deep=deep, quorum=quorum), hear_s=0.0).check([])
            await record(self, verdicts)

        try:
            asyncio.run(work())
        except Killed:
            pass
        except BaseExceptionGroup as group:
            assert self.dead and group.split(Killed)[1] is None, group
        except RaftmetaError as error:
            assert error.code == "no_quorum", error

    def require_truth(self) -> None:
        for verdict, report in self.recorded:
            if verdict == DIVERGED:
                assert self.was_damaged, (self.faults, report["findings"])
                assert {finding["code"] for finding in report["findings"]} <= {
                    "sides",
                    "block",
                    "tensor",
                    "vector_root",
                    "sha256",
                    *CHANGING,
                }
            if verdict == CONSISTENT:
                assert not self.read_damaged, self.faults
                assert all(node["answered"] for node in report["nodes"]), self.faults
                assert {node["vector_root"] for node in report["nodes"]} == {report["vector_root"]}, self.faults


CHANGING = ("self_contradiction",)  # of memory that is damaged between two questions


def test_nothing_happens_and_the_truth_is_recorded() -> None:
    for damaged, verdict in (((), CONSISTENT), (("b1",), DIVERGED), (("a1", "b1", "b2"), DIVERGED)):
        for deep in (False, True):
            world = World(damaged)
            world.check(deep)
            assert [said for said, _ in world.recorded] == [verdict]
            assert world.moment < MOMENTS
            world.require_truth()


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damaged", [(), ("b1",), ("a1", "b1", "b2")])
def test_one_thing_at_any_moment_leaves_no_wrong_verdict(damaged: tuple[str, ...], kind: str, deep: bool) -> None:
    for moment in range(1, MOMENTS):
        world = World(damaged, {moment: kind})
        world.check(deep)
        world.require_truth()
        if moment > world.moment:
            assert len(world.recorded) == 1, "nothing happened"
            break


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([(), ("b1",), ("b1", "b2"), ("a1", "b1", "b2")]),
    st.dictionaries(st.integers(1, MOMENTS), st.sampled_from(KINDS), max_size=6),
    st.booleans(),
    st.sampled_from(["all", "majority", "1"]),
)
def test_many_things_at_any_moments_leave_no_wrong_verdict(
    damaged: tuple[str, ...], faults: dict[int, str], deep: bool, quorum: str
) -> None:
    world = World(damaged, faults)
    world.check(deep, quorum)
    world.require_truth()


def test_a_switch_at_any_moment_is_reported_as_such_or_missed_by_nobody() -> None:
    for kind in ("switch", "switch_begins"):
        for moment in range(1, 20):
            world = World((), {moment: kind})
            verdicts = asyncio.run(Checker(world, world, hear_s=0.0).check([]))
            told = [reason.code for reason in verdicts[0].reasons]
            if verdicts[0].verdict == CONSISTENT:
                assert verdicts[0].version == ("v1" if moment > world.moment or verdicts[0].order_revision == 700 else "v2")
            else:
                assert (verdicts[0].verdict, set(told)) == ("incomplete", {"switching"}), (moment, kind, told)
