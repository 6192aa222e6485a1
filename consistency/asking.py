"""The questions to nodes that a check asks beyond roots: entries, block checks, digests, and what is kept of the answers.

A node that cannot be asked, or that is no longer the one it was at the first question, is a gap in the verdict, never the end of the check.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from consistency import weights
from consistency.agent_answers import AgentFault
from consistency.findings import Answer, Difference, Digested, DigestPage, NodeVector, Target, TensorSpec

if TYPE_CHECKING:
    from consistency.entries import Words

T = TypeVar("T")

MAX_ENTRIES = 4  # answers with entries at the same time, each of up to 64 MiB
MAX_TRIES = 16  # nodes with one root that are asked for its entries
MAX_PUBLISHERS = 8  # nodes that are asked for what was published of one tensor
MAX_BLOCKS = 8  # answers with block checks at the same time
MAX_DEEP = 8  # nodes whose digests are compared at the same time
CLOSER_QUESTIONS = 8  # one after the other, of full length, that fit into the time for entries and blocks of one deployment
# What nodes compute digests of for one question. For all of them a node has the time of as many questions as that makes.
PAGE_BYTES, PAGE_TENSORS = 1 << 30, 4_096


class Agents(Protocol):
    """What a check needs of the nodes. All raise AgentFault."""

    async def vectors(self, url: str, deployments: Sequence[str], max_age_ms: int | None) -> Mapping[str, NodeVector | AgentFault]: ...
    async def vector(self, url: str, deployment: str, entries: bool) -> NodeVector: ...
    async def blocks(self, url: str, deployment: str, tensor: str, size_bytes: int, published: bool = False) -> Words: ...
    async def digests(self, url: str, deployment: str, after: str) -> DigestPage: ...


@dataclass(frozen=True)
class Patience:
    """With the nodes of one deployment: no other's verdict is given before they were asked."""

    question_s: float  # the longest that a node may take for one
    clock: Callable[[], float]
    until_s: float  # by the clock; where tensors and blocks differ is not asked any more then

    @classmethod
    def from_now(cls, question_s: float, clock: Callable[[], float]) -> Patience:
        return cls(question_s, clock, clock() + CLOSER_QUESTIONS * question_s)

    @property
    def is_over(self) -> bool:
        return self.clock() >= self.until_s

    def digests_s(self, tensors: Mapping[str, TensorSpec]) -> float:
        """For all digests of a node."""
        size_bytes = sum(spec.size_bytes for spec in tensors.values())
        return self.question_s * (1 + size_bytes / PAGE_BYTES + len(tensors) / PAGE_TENSORS)


@dataclass(frozen=True)
class Asking:
    """About one deployment whose manifest is at hand."""

    agents: Agents
    urls: Mapping[str, str]  # node -> where it listens
    target: Target
    tensors: Mapping[str, TensorSpec]  # the whole manifest's
    patience: Patience
    _block_turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_BLOCKS), init=False)

    async def entries(self, answers: Sequence[Answer], groups: Sequence[Sequence[str]]) -> list[Answer]:
        """With the differences of the nodes of these groups; of a group one node is asked, others only while that was of no use."""
        by_node = {answer.place.node: answer for answer in answers}
        turn = asyncio.Semaphore(MAX_ENTRIES)

        async def one(group: Sequence[str]) -> None:
            shared: Difference | None = None
            for tries, node in enumerate(group):
                if shared is not None:
                    by_node[node] = msgspec.structs.replace(by_node[node], difference=shared)
                elif tries < MAX_TRIES:
                    async with turn:
                        if self.patience.is_over:
                            return
                        answer = by_node[node] = await self._entries(by_node[node])
                    seen = answer.difference
                    shared = seen if seen is not None and answer.vector is not None and seen.root == answer.vector.vector_root else None

        await all_of(one(group) for group in groups)
        return list(by_node.values())

    async def _entries(self, answer: Answer) -> Answer:
        first = answer.vector
        assert first is not None
        try:
            second = await self.agents.vector(self.urls[first.node], self.target.deployment, entries=True)
        except AgentFault as fault:
            return msgspec.structs.replace(answer, code=fault.code, detail=fault.detail)
        if (second.identity, second.node, second.deployment) != (first.identity, first.node, first.deployment):
            return changed_meanwhile(answer)
        assert second.entries is not None
        # The first root stays: entries that do not add up to it are a finding.
        return msgspec.structs.replace(answer, difference=weights.difference(self.tensors, second.entries))

    async def blocks(self, answers: Sequence[Answer]) -> dict[tuple[str, str], Words]:
        """By (node, tensor), and by (PUBLISHED, tensor) what the manifest's entry was made of.

        What cannot be had is left out: the finding then names the tensor and no block.
        """
        wanted = weights.needing_blocks(self.target, answers)
        told = {answer.place.node: dict(answer.difference.changed) for answer in answers if answer.difference is not None}
        tensors = list(dict.fromkeys(tensor for _, tensor in wanted))
        given = await all_of(
            [
                *(self._block(node, tensor, told[node][tensor]) for node, tensor in wanted),
                *(self._as_published(name, wanted, answers) for name in tensors),
            ]
        )
        keys = [*wanted, *((weights.PUBLISHED, name) for name in tensors)]
        return {key: checks for key, checks in zip(keys, given, strict=True) if checks is not None}

    async def _as_published(self, tensor: str, wanted: Sequence[tuple[str, str]], answers: Sequence[Answer]) -> Words | None:
        """From the file of block checks of a node, or else from the memory of one that holds the tensor as the manifest says."""
        spec = self.tensors[tensor]
        holder = weights.holder(self.target, answers, tensor)
        differing = [node for node, name in wanted if name == tensor]
        others = [answer.vector.node for answer in answers if answer.vector is not None and answer.vector.checksum == self.target.checksum]
        for node in list(dict.fromkeys([*([holder] if holder else []), *differing, *others]))[:MAX_PUBLISHERS]:
            checks = await self._block(node, tensor, spec.entry, published=True)
            if checks is not None:
                return checks
        return await self._block(holder, tensor, spec.entry) if holder else None

    async def _block(self, node: str, tensor: str, entry: str, published: bool = False) -> Words | None:
        """None as well for what does not hash to the entry: it says nothing, and is not kept."""
        spec = self.tensors[tensor]
        async with self._block_turn:
            if self.patience.is_over:
                return None
            try:
                checks = await self.agents.blocks(self.urls[node], self.target.deployment, tensor, spec.size_bytes, published)
            except AgentFault:
                return None
        return checks if weights.hash_to(spec, checks) == entry else None

    async def digests(self, answers: Sequence[Answer], say: Callable[[str], None]) -> list[Answer]:
        """With the digests compared of all nodes that serve the decided version."""
        turn = asyncio.Semaphore(MAX_DEEP)

        async def one(answer: Answer) -> Answer:
            if answer.vector is None or answer.vector.checksum != self.target.checksum:
                return answer
            async with turn:
                say(f"{self.target.deployment}: SHA-256 of the memory of {answer.vector.node}")
                return await self._digests(answer, answer.vector)

        return await all_of(one(answer) for answer in answers)

    async def _digests(self, answer: Answer, seen: NodeVector) -> Answer:
        pending = set(self.tensors)
        wrong: list[tuple[str, str]] = []
        wrong_total, after = 0, ""
        allowed_s, taken_s = self.patience.digests_s(self.tensors), 0.0
        for _ in range(len(self.tensors) + 1):  # a page with more behind it tells of one at least
            try:
                page = await self.agents.digests(self.urls[seen.node], self.target.deployment, after)
            except AgentFault as fault:
                return msgspec.structs.replace(answer, code=fault.code, detail=fault.detail)
            if (page.identity, page.node, page.deployment) != (seen.identity, seen.node, seen.deployment):
                return changed_meanwhile(answer)
            told = sorted(page.sha256.keys() & pending)
            found = [(name, page.sha256[name]) for name in told if page.sha256[name] != self.tensors[name].sha256]
            wrong += found[: weights.MAX_LISTED - len(wrong)]
            wrong_total += len(found)
            pending.difference_update(told)
            if not page.following:
                break
            if page.following <= after:
                return msgspec.structs.replace(answer, code="bad_answer", detail=f"its digests go in circles at {after[:200]!r}")
            taken_s += page.taken_s
            if not told:
                detail = f"a page of its digests, with more behind it, tells of no tensor that is missing, after {after[:200]!r}"
                return msgspec.structs.replace(answer, code="bad_answer", detail=detail)
            if taken_s > allowed_s:
                detail = (
                    f"it told the digests of {len(self.tensors) - len(pending)} of {len(self.tensors)} tensors within {allowed_s:.0f} s"
                )
                return msgspec.structs.replace(answer, code="timed_out", detail=detail)
            after = page.following
        digested = Digested(tuple(wrong), wrong_total)
        if pending:
            detail = f"it left out the digests of {len(pending)} tensors, {min(pending)[:200]!r} for one"
            return msgspec.structs.replace(answer, digested=digested, code="bad_answer", detail=detail)
        return msgspec.structs.replace(answer, digested=digested)


def changed_meanwhile(answer: Answer) -> Answer:
    return Answer(answer.place, None, "changed_meanwhile", "the node switched or restarted between two questions")


async def all_of(work: Iterable[Awaitable[T]]) -> list[T]:
    """Results in order; the first error ends all."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_run(item)) for item in work]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return [task.result() for task in tasks]


async def _run(item: Awaitable[Any]) -> Any:
    return await item
