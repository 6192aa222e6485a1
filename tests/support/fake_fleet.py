"""A fleet in memory: members that remember what was decided, and nodes whose weights a test may damage byte by byte.

`FakeFleet` has the calls of the client SDK that a check uses, `FakeAgents` those of the agents; `routes` serves the same answers over HTTP.
Vectors are computed from the nodes' own bytes at the moment of the question, as an agent computes them from its slot.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from consistency import vector
from consistency.agent_answers import AgentFault
from consistency.collect import Checker
from consistency.findings import DigestPage, Finding, Limits, NodeVector, Verdict
from raftmeta.client import Page, Reply
from raftmeta.core import manifest as manifests
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import FileEntry, Manifest, TensorEntry
from tests.support.stub_http import Answer, Route, problem

MODEL, DEPLOYMENT = "tiny", "search"
TensorBytes = dict[str, tuple[str, tuple[int, ...], bytearray]]


def weights(seed: int = 1) -> TensorBytes:
    """Any bytes will do as numbers; these are the same everywhere."""
    shapes = {"embed.weight": (100, 700), "layer.0.weight": (40, 50), "layer.0.bias": (50,), "norm": ()}
    return {
        name: ("F32", shape, bytearray(hashlib.shake_128(f"{seed} {name}".encode()).digest(4 * math.prod(shape))))
        for name, shape in shapes.items()
    }


def manifest_of(tensors: TensorBytes) -> Manifest:
    entries, offset = [], 0
    for name, (dtype, shape, data) in sorted(tensors.items()):
        entry = vector.tensor_entry(data, dtype, shape).entry
        sha256 = hashlib.sha256(data).hexdigest()
        entries.append(TensorEntry(name, dtype, shape, "model.safetensors", offset, offset + len(data), sha256, entry))
        offset += len(data)
    files = (FileEntry("config.json", 2, "1" * 64, "config"), FileEntry("model.safetensors", offset, "2" * 64, "weights"))
    root = vector.root({tensor.name: tensor.entry for tensor in entries})
    return Manifest(manifests.FORMAT, "hf", files, tuple(entries), (), root, ())


@dataclass
class FakeNode:
    name: str
    tensors: TensorBytes
    version: str
    checksum: str
    config_digest: str
    lag_ms: float = 40.0
    active_models: int = 1
    switching: bool = False
    epoch: int = 3
    boot_id: str = "boot-1"
    age_ms: int = 7
    block_file: dict[str, vector.Words] = field(default_factory=dict)  # by tensor; empty: a version without the file
    fault: AgentFault | None = None  # raised instead of any answer
    before_answer: Callable[[str], None] = lambda question: None  # called with roots | entries | blocks | published | digests

    def damage(self, tensor: str, at: int, xor: int = 0x80) -> None:
        self.tensors[tensor][2][at] ^= xor

    def vector(self, entries: bool) -> NodeVector:
        self._asked("entries" if entries else "roots")
        made = {name: vector.tensor_entry(data, dtype, shape).entry for name, (dtype, shape, data) in self.tensors.items()}
        return NodeVector(
            self.name,
            self.boot_id,
            DEPLOYMENT,
            MODEL,
            self.version,
            self.checksum,
            1,
            self.epoch,
            vector.root(made),
            self.config_digest,
            1_700_000_000_000,
            self.lag_ms,
            self.active_models,
            self.switching,
            made if entries else None,
            self.age_ms,
        )

    def digests(self, after: str) -> DigestPage:
        """Two tensors a page."""
        self._asked("digests")
        names = sorted(name for name in self.tensors if name > after)
        found = {name: hashlib.sha256(self.tensors[name][2]).hexdigest() for name in names[:2]}
        following = names[1] if len(names) > 2 else ""
        return DigestPage(self.name, self.boot_id, DEPLOYMENT, self.checksum, 1, self.epoch, found, following)

    def blocks(self, tensor: str) -> vector.Words:
        self._asked("blocks")
        return vector.block_checks(self.tensors[tensor][2])

    def published_blocks(self, tensor: str) -> vector.Words:
        self._asked("published")
        if not self.block_file:
            raise AgentFault("not_found", "no file of block checks is here")
        return self.block_file[tensor]

    def _asked(self, question: str) -> None:
        self.before_answer(question)
        if self.fault:
            raise self.fault


class FakeFleet:
    """Members. Declares one deployment over two zones and activates version v1 on every node."""

    def __init__(self, primary: tuple[str, ...] = ("a1",), standby: tuple[str, ...] | None = ("b1",)) -> None:
        self.revision = 812
        self.generation = 2
        self.deployments: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, dict[str, Any]] = {}
        self.manifests: dict[str, Manifest] = {}
        self.rollouts: dict[str, dict[str, Any]] = {}
        self.urls: dict[str, str] = {}
        self.recorded: list[tuple[str, str, Mapping[str, Any]]] = []
        self.bases: list[Mapping[str, Any]] = []
        self.fault: RaftmetaError | None = None  # raised by every call
        self.publish("v1", weights())
        version = self.versions[f"{MODEL}/v1"]
        self.nodes_by_name = {
            name: FakeNode(name, weights(), "v1", version["checksum"], version["config_digest"]) for name in (*primary, *(standby or ()))
        }
        self.urls = {name: f"http://{name}" for name in self.nodes_by_name}
        self.declare(DEPLOYMENT, primary, standby, version="v1", order_revision=700, activated_revision=701)

    def publish(self, label: str, tensors: TensorBytes) -> None:
        made = manifest_of(tensors)
        summary = manifests.summarize(made, manifests.pack(made))
        fields = msgspec.to_builtins(msgspec.structs.asdict(summary))
        self.manifests[f"{MODEL}/{label}"] = made
        self.versions[f"{MODEL}/{label}"] = {"model": MODEL, "label": label, "number": len(self.versions) + 1, **fields}

    def declare(self, name: str, primary: tuple[str, ...], standby: tuple[str, ...] | None, **state: Any) -> None:
        fresh = {"version": "", "previous": "", "rollout_id": "", "order_revision": 0, "activated_revision": 0}
        sides = {"primary": {"zone": "a", "nodes": list(primary)}, "standby": standby and {"zone": "b", "nodes": list(standby)}}
        self.deployments[name] = {"name": name, "model": MODEL, "policy": {}, **fresh, **sides, **state}

    async def list_deployments(self, page: Page, /) -> Reply:
        """One to a page, so that nobody forgets to turn it."""
        names = sorted(name for name in self.deployments if name > (page.after or ""))
        return self._reply({"items": [self.deployments[name] for name in names[:1]], "next": names[0] if len(names) > 1 else None})

    async def get_version(self, model: str, label: str, /) -> Reply:
        return self._reply(self.versions[f"{model}/{label}"])

    async def get_manifest(self, model: str, label: str, /) -> Reply:
        return self._reply(msgspec.to_builtins(self.manifests[f"{model}/{label}"]))

    async def get_rollout(self, rollout_id: str, /) -> Reply:
        return self._reply(self.rollouts[rollout_id])

    async def nodes(self) -> Reply:
        return self._reply({"items": [{"node": node, "url": url} for node, url in sorted(self.urls.items())], "next": None})

    async def record_verdicts(self, items: Sequence[Mapping[str, Any]], /) -> Reply:
        reply = self._reply({"items": [{"revision": self.revision} for _ in items]})
        self.recorded += [(item["deployment"], item["verdict"], item["report"]) for item in items]
        self.bases += [item["basis"] for item in items]
        return reply

    def _reply(self, body: dict[str, Any]) -> Reply:
        if self.fault:
            raise self.fault
        return Reply(dict(body), status=200, revision=self.revision, generation=self.generation)

    def count_calls(self) -> dict[str, int]:
        """How often each call of the members is made from now on, those that never are left out."""
        counts: dict[str, int] = {}

        def counted(name: str) -> None:
            call = getattr(self, name)

            def count(*arguments: Any) -> Any:
                counts[name] = counts.get(name, 0) + 1
                return call(*arguments)

            setattr(self, name, count)

        for name in ("list_deployments", "nodes", "get_version", "get_manifest", "get_rollout", "record_verdicts"):
            counted(name)
        return counts


@dataclass
class FakeAgents:
    fleet: FakeFleet
    asked: list[tuple[str, str]] = field(default_factory=list)  # node, question

    async def vectors(self, url: str, deployments: Sequence[str], max_age_ms: int | None) -> dict[str, NodeVector | AgentFault]:
        node = self._node(url)
        self.asked.append((node.name, "roots"))
        given = node.vector(entries=False)
        return {name: msgspec.structs.replace(given, deployment=name) for name in deployments}

    async def vector(self, url: str, deployment: str, entries: bool) -> NodeVector:
        assert entries
        node = self._node(url)
        self.asked.append((node.name, "entries"))
        return node.vector(entries)

    async def digests(self, url: str, deployment: str, after: str) -> DigestPage:
        node = self._node(url)
        self.asked.append((node.name, f"digests after {after!r}"))
        return node.digests(after)

    async def blocks(self, url: str, deployment: str, tensor: str, size_bytes: int, published: bool = False) -> vector.Words:
        node = self._node(url)
        self.asked.append((node.name, f"published {tensor}" if published else tensor))
        return node.published_blocks(tensor) if published else node.blocks(tensor)

    def _node(self, url: str) -> FakeNode:
        return self.fleet.nodes_by_name[url.removeprefix("http://")]


def check(fleet: FakeFleet, *names: str, limits: Limits | None = None) -> list[Verdict]:
    return asyncio.run(Checker(fleet, FakeAgents(fleet), limits or Limits()).check(names))


def verdict_of(fleet: FakeFleet) -> Verdict:
    (made,) = check(fleet, DEPLOYMENT)
    return made


def vectors_route(node: FakeNode) -> Route:
    """The node's answer for all its deployments; nodes of earlier builds have none."""

    def answer(body: Any, query: dict[str, str]) -> Answer:
        names = query["deployments"].split(",")
        try:
            whole = dict(msgspec.to_builtins(node.vector(entries=False)))
        except AgentFault as fault:
            return problem(fault.code, fault.detail)
        shared = {name: whole.pop(name) for name in ("node", "boot_id", "active_models")}
        vectors = dict.fromkeys(names, whole | {"vector_from": "memory"})
        return Answer({**shared, "vectors": vectors, "faults": {}})

    return answer


def vector_route(node: FakeNode) -> Route:
    """The node's answers for one deployment."""

    def answer(body: Any, query: dict[str, str]) -> Answer:
        try:
            if "sha256" in query:
                return Answer(msgspec.to_builtins(node.digests(query.get("after", ""))))
            if "blocks" in query:
                found = node.published_blocks(query["blocks"]) if "published" in query else node.blocks(query["blocks"])
                packed = base64.b64encode(vector.pack_blocks(found)).decode()
                return Answer({"tensor": query["blocks"], "blocks": packed})
            return Answer(msgspec.to_builtins(node.vector(query["entries"] == "1")))
        except AgentFault as fault:
            return problem(fault.code, fault.detail)

    return answer


def routes(fleet: FakeFleet) -> dict[tuple[str, str], Route]:
    """The members' part of the HTTP interface, and their record of verdicts."""
    made: dict[tuple[str, str], Route] = {}

    def get(path: str, body: Callable[[], Any]) -> None:
        made["GET", path] = lambda _, query: Answer(body())

    get("/v1/deployments", lambda: {"items": list(fleet.deployments.values()), "next": None})
    get("/v1/nodes", lambda: {"items": [{"node": node, "url": url} for node, url in fleet.urls.items()]})
    for name in {*fleet.deployments, "another"}:
        get(f"/v1/deployments/{name}", lambda name=name: fleet.deployments[name])
    for key, version in fleet.versions.items():
        model, label = key.split("/")
        get(f"/v1/models/{model}/versions/{label}", lambda version=version: version)
        get(f"/v1/models/{model}/versions/{label}/manifest", lambda key=key: msgspec.to_builtins(fleet.manifests[key]))

    def record(body: Any, query: dict[str, str]) -> Answer:
        fleet.recorded += [(item["deployment"], item["verdict"], item["report"]) for item in body["items"]]
        return Answer({"items": [{"revision": fleet.revision} for _ in body["items"]]})

    made["POST", "/v1/consistency:batch"] = record
    return made


def codes(made: Verdict) -> list[str]:
    return [finding.code for finding in made.findings] + [reason.code for reason in made.reasons]


def in_memory(made: Verdict) -> list[Finding]:
    """What was found on nodes, without the comparison of the sides as a whole."""
    return [finding for finding in made.findings if finding.code != "sides"]
