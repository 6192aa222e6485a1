"""The check of a fleet: asks members what was decided and every node what it holds, then lets the pure rules judge.

Roots first, in one question to each node about all of its deployments; entries only where a root differs, block checks only of tensors that
differ. A node that cannot be asked is a reason in the verdict, never the end of the check. Everything that was decided is read again at the
end: where an order, the nodes or the generation changed meanwhile, what the nodes said belongs to two decisions and is not judged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from consistency import compare, target, weights
from consistency.agent_answers import AgentFault
from consistency.asking import Agents, Asking, Patience, all_of
from consistency.clock import boottime
from consistency.findings import Answer, Limits, NodePlace, NodeVector, Target, Verdict
from consistency.scene import Scene
from consistency.target import Listed, VersionSeen
from raftmeta.client import Page, Reply
from raftmeta.core.errors import RaftmetaError

if TYPE_CHECKING:
    from consistency.entries import Words

MAX_AT_ONCE = 8  # questions to members; more cost more: the library looks at all of its connections for each
MAX_MANIFESTS = 4  # that are looked at closely at the same time; one of 200,000 tensors takes 100 MB as objects
PAGE = 200  # deployments of a page, of up to 2,000 nodes each
MAX_PAGES = 10_000
HEAR_S = 5.0  # two heartbeats of a node: a member that has just started knows only the nodes that it heard of since
LOOK_S = 0.25


class NotDeclared(RaftmetaError):
    """The caller named a deployment that there is not."""

    def __init__(self, name: str) -> None:
        super().__init__("unknown_deployment", f"no deployment is called {name!r}")


class Members(Protocol):
    """What a check needs of the client SDK."""

    async def list_deployments(self, page: Page, /) -> Reply: ...
    async def get_version(self, model: str, label: str, /) -> Reply: ...
    async def get_manifest(self, model: str, label: str, /) -> Reply: ...
    async def get_rollout(self, rollout_id: str, /) -> Reply: ...
    async def nodes(self) -> Reply: ...


class _Closer(NamedTuple):
    """What a close look at a deployment's nodes adds."""

    answers: list[Answer]
    blocks: dict[tuple[str, str], Words]
    target: Target


class Judged(NamedTuple):
    verdicts: list[Verdict]
    given_s: float  # when, by the clock
    idle: tuple[str, ...]  # deployments that were not asked for by name and left out: nothing was activated yet


def _quiet(_: str) -> None: ...


@dataclass(frozen=True)
class Checker:
    members: Members
    agents: Agents
    limits: Limits = field(default_factory=Limits)
    say: Callable[[str], None] = _quiet  # told what is being done
    hear_s: float = HEAR_S  # how long a node that no member has heard of is waited for
    clock: Callable[[], float] = boottime  # seconds, for how old an answer is at the verdict
    question_s: float = 60.0  # the longest that a node may take for one: how long many may take follows from it

    async def check(self, names: Sequence[str]) -> list[Verdict]:
        """A verdict for each deployment, in the order of the names; of all that serve something when none is named."""
        return (await self.judged(names)).verdicts

    async def judged(self, names: Sequence[str]) -> Judged:
        """The same with what belongs to it. Raises NotDeclared, or RaftmetaError when members cannot be asked."""
        listed = await self._read()
        for name in names:
            if name not in listed:
                raise NotDeclared(name)
        idle = () if names else tuple(sorted(name for name in listed if not listed[name].seen.version))
        chosen = list(names or sorted(listed.keys() - set(idle)))
        urls = await self._urls({node for name in chosen for node in listed[name].seen.nodes})
        return Judged(*await _Round(self, urls, listed, chosen).run(), idle)

    async def _read(self) -> dict[str, Listed]:
        found: dict[str, Listed] = {}
        after: str | None = None
        for _ in range(MAX_PAGES):
            reply = await self.members.list_deployments(Page(PAGE, after))
            page = target.page_of(reply)
            for item in page.items:
                seen = target.deployment_of(item)
                found[seen.name] = Listed(seen, reply.revision, reply.generation)
            if not page.next:
                return found
            if page.next == after:
                raise RaftmetaError("internal", f"the list of deployments goes in circles at {after!r}")
            after = page.next
        raise RaftmetaError("body_too_large", f"the list of deployments has more than {MAX_PAGES} pages")

    async def _urls(self, expected: set[str]) -> dict[str, str]:
        """Where nodes listen, once all that are expected have been heard of or had the time to say so."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.hear_s
        while True:
            urls = target.urls_of(await self.members.nodes())
            unheard = sorted(expected - urls.keys())
            if not unheard or loop.time() >= until:
                return urls
            self.say(f"waiting for a member to hear of {', '.join(unheard[:3])}{' and others' if len(unheard) > 3 else ''}")
            await asyncio.sleep(LOOK_S)


class _Round:
    """One check of the chosen deployments."""

    def __init__(self, checker: Checker, urls: Mapping[str, str], listed: Mapping[str, Listed], chosen: Sequence[str]) -> None:
        self._members, self._agents, self._limits, self._say = checker.members, checker.agents, checker.limits, checker.say
        self._read, self._clock, self._question_s = checker._read, checker.clock, checker.question_s
        self._urls = urls
        self._listed = listed
        self._chosen = chosen
        self._counts = target.active_models(item.seen for item in listed.values())
        self._turn = asyncio.Semaphore(MAX_AT_ONCE)
        self._manifests = asyncio.Semaphore(MAX_MANIFESTS)
        self._heard: dict[str, float] = {}  # node -> when it answered
        self._gaps: dict[str, RaftmetaError] = {}  # deployment -> why its version could not be looked up

    async def run(self) -> tuple[list[Verdict], float]:
        targets = await self._targets()
        nodes: dict[str, dict[str, NodePlace]] = {}  # node -> deployment -> its place there
        for name in self._chosen:
            for place in targets[name].places:
                nodes.setdefault(place.node, {})[name] = place
        self._say(f"reading the memory of {len(nodes)} nodes for {len(self._chosen)} deployments")
        given = dict(zip(nodes, await all_of(self._roots(node, places) for node, places in nodes.items()), strict=True))
        answers = {name: [given[place.node][name] for place in targets[name].places] for name in self._chosen}
        closer = await all_of(self._guarded(name, targets[name], answers[name]) for name in self._chosen)
        try:
            again = await self._read()
        except RaftmetaError as error:
            return [compare.gave_up(targets[name], error, self._limits) for name in self._chosen], self._clock()
        counts = target.active_models(item.seen for item in again.values())
        now = self._clock()
        return [self._judge(name, found, again, counts, now) for name, found in zip(self._chosen, closer, strict=True)], now

    async def _targets(self) -> dict[str, Target]:
        """What was decided; a version that a member of an earlier build left out is looked up, once."""
        chosen = [self._listed[name].seen for name in self._chosen]
        wanted = {(item.model, item.version) for item in chosen if item.version and item.serving is None}
        found = dict(zip(wanted, await all_of(self._version(*key) for key in wanted), strict=True))
        made: dict[str, Target] = {}
        for name in self._chosen:
            listed = self._listed[name]
            seen = listed.seen
            places = target.place_nodes(seen, self._counts, self._counts)
            version = seen.serving or found.get((seen.model, seen.version))
            if isinstance(version, RaftmetaError):
                self._gaps[name] = version
                version, places = None, ()
            made[name] = target.target_of(listed, places, version)
        return made

    async def _version(self, model: str, label: str) -> VersionSeen | RaftmetaError:
        async with self._turn:
            try:
                return target.version_of(await self._members.get_version(model, label))
            except RaftmetaError as error:
                return error

    async def _roots(self, node: str, places: Mapping[str, NodePlace]) -> dict[str, Answer]:
        """What a node says of these deployments, in one question."""
        url = self._urls.get(node)
        if not url:
            return {name: Answer(place, None, "unknown_node", "no member has heard of this node") for name, place in places.items()}
        try:
            given = await self._agents.vectors(url, list(places), self._limits.max_age_ms)
        except AgentFault as fault:
            return {name: Answer(place, None, fault.code, fault.detail) for name, place in places.items()}
        self._heard[node] = self._clock()
        return {name: _answer(place, name, given.get(name)) for name, place in places.items()}

    async def _guarded(self, name: str, wanted: Target, answers: list[Answer]) -> _Closer | RaftmetaError:
        """Members that fall silent, or refuse what only this deployment names, leave it incomplete."""
        if name in self._gaps:
            return self._gaps[name]
        try:
            return await self._closer(name, wanted, answers)
        except RaftmetaError as error:
            return error

    async def _closer(self, name: str, wanted: Target, answers: list[Answer]) -> _Closer:
        """Entries and blocks of nodes that differ, digests if they are asked for, attested lags where a node knows none."""
        wanted = await self._with_lags(name, wanted, answers)
        groups = weights.needing_entries(wanted, answers)
        deep = self._limits.deep and bool(wanted.version) and not wanted.switching
        blocks: dict[tuple[str, str], Words] = {}
        if not groups and not deep:
            return _Closer(answers, blocks, wanted)
        async with self._manifests:
            manifest = await self._members.get_manifest(wanted.model, wanted.version)
            tensors = target.tensors_of(manifest, wanted)
            asking = Asking(self._agents, self._urls, wanted, tensors, Patience.from_now(self._question_s, self._clock))
            if groups:
                self._say(f"{name}: {sum(map(len, groups))} of {len(answers)} nodes differ; asking which tensors")
                answers = await asking.entries(answers, groups)
                wanted = msgspec.structs.replace(wanted, tensors=weights.named(tensors, answers))
                blocks = await asking.blocks(answers)
            if deep:
                answers = await asking.digests(answers, self._say)
            return _Closer(answers, blocks, msgspec.structs.replace(wanted, tensors=weights.named(tensors, answers)))

    async def _with_lags(self, name: str, wanted: Target, answers: Sequence[Answer]) -> Target:
        rollout_id = self._listed[name].seen.rollout_id
        if not rollout_id or not any(answer.vector is not None and answer.vector.lag_ms < 0 for answer in answers):
            return wanted
        async with self._turn:
            try:
                lags = target.attested_lags(await self._members.get_rollout(rollout_id), wanted.version)
            except RaftmetaError as error:  # the lag stays unknown, which the verdict says; the weights can be compared without it
                self._say(f"{name}: the rollout that brought its version could not be read: {error}")
                return wanted
        return msgspec.structs.replace(wanted, attested_lags=lags)

    def _judge(self, name: str, found: _Closer | RaftmetaError, again: Mapping[str, Listed], counts: target.Counts, now: float) -> Verdict:
        if isinstance(found, RaftmetaError):
            wanted = target.target_of(self._listed[name], (), None)
            return compare.gave_up(wanted, found, self._limits)
        before, after = self._listed[name], again.get(name)
        wanted = found.target
        is_same = after is not None and before.generation == after.generation and not target.moved(before.seen, after.seen)
        places = {place.node: place for place in target.place_nodes(before.seen, self._counts, counts)}
        wanted = msgspec.structs.replace(wanted, places=tuple(places[place.node] for place in wanted.places))
        if after is not None:
            wanted = msgspec.structs.replace(wanted, revision=after.revision, generation=after.generation)
        if not is_same:
            told = "the deployment was switched or changed while it was checked; check again"
            wanted = msgspec.structs.replace(wanted, moved=True, switching=wanted.switching or told)
        answers = [
            msgspec.structs.replace(answer, place=places[answer.place.node], since_ms=self._since_ms(answer, now))
            for answer in found.answers
        ]
        return compare.compare(Scene(wanted, answers, found.blocks, self._limits))

    def _since_ms(self, answer: Answer, now: float) -> int:
        """Since the node answered, at most: the time in which the answer was under way belongs to it."""
        under_way_ms = 0 if answer.vector is None else answer.vector.under_way_ms
        return under_way_ms + round(1000 * (now - self._heard.get(answer.place.node, now)))


def _answer(place: NodePlace, deployment: str, given: NodeVector | AgentFault | None) -> Answer:
    if given is None:
        return Answer(place, None, "bad_answer", f"the node left {deployment!r} out")
    if isinstance(given, AgentFault):
        return Answer(place, None, given.code, given.detail)
    if (given.node, given.deployment) != (place.node, deployment):
        found = f"{given.node!r} for {given.deployment!r}"
        return Answer(place, None, "bad_answer", f"asked {place.node!r} for {deployment!r}, the answer is of {found}")
    return Answer(place, given)
