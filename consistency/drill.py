"""What a drill of a fail-over saw, from the client's side: requests with one retry, decisions, and when each node began to refuse. Pure.

Times are monotonic seconds of the machine that drills. A request that was answered by the first node or by its one retry is not lost,
whatever it waited. The recovery time of a fail-over is from the moment at which it was asked for to the first answer of the new side that
came after it. A node of the old side that was asked after it had been seen refusing, and answers, is a breach of the fence.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from raftmeta.cli.output import printable

MAX_SHOWN = 5  # lost requests, of text


class Try(NamedTuple):
    """One request to one node."""

    node: str
    side: str
    begun_s: float
    ended_s: float
    version: str  # that computed the answer, "" without one
    fault: str = ""  # code of what came instead of an answer

    @property
    def answered(self) -> bool:
        return not self.fault


class Asked(NamedTuple):
    """One request of the client with its tries, one or two."""

    due_s: float
    tries: tuple[Try, ...]

    @property
    def lost(self) -> bool:
        return not self.tries[-1].answered

    @property
    def took_s(self) -> float:
        return self.tries[-1].ended_s - self.due_s


@dataclass(frozen=True)
class Move:
    """One decision to let the other side serve."""

    to: str
    old: str
    asked_s: float
    decided_s: float
    order_revision: int
    refused_s: Mapping[str, float] = field(default_factory=dict)  # nodes of the old side, when each was first seen refusing


class Found(NamedTuple):
    """One fail-over, as its client saw it. Times in ms; None: never."""

    to: str
    order_revision: int
    decided_ms: float
    recovery_ms: float | None
    fenced_ms: dict[str, float]
    unfenced: tuple[str, ...]  # nodes of the old side that were never seen refusing
    longest_gap_ms: float  # between two answers in a row, from one second before it was asked for to the next decision
    breaches: int  # answers of nodes that were asked after they had been seen refusing


@dataclass(frozen=True)
class Drill:
    deployment: str
    model: str
    rate: float
    began_s: float
    ended_s: float
    asked: Sequence[Asked]
    moves: Sequence[Move]
    old_nodes: Mapping[str, Sequence[str]]  # side -> nodes
    trouble: str = ""  # why it ended early, and who serves
    capacity: float = 0.0  # requests a second of the smaller side by its nodes' counts, 0: unknown
    serves: str = ""  # the side that serves afterwards, "": the members do not say

    @property
    def lost(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.lost]

    @property
    def retried(self) -> int:
        return sum(len(asked.tries) > 1 for asked in self.asked)

    @property
    def found(self) -> list[Found]:
        ends = [*(move.asked_s for move in self.moves), self.ended_s][1:]
        return [self._found(move, end_s) for move, end_s in zip(self.moves, ends, strict=True)]

    @property
    def holds(self) -> bool:
        """Nothing was lost, every fail-over recovered, and every node of the old side refused from then on."""
        found = self.found
        moved = bool(found) and all(move.recovery_ms is not None and not move.unfenced and not move.breaches for move in found)
        return moved and bool(self.asked) and not self.lost and not self.trouble

    def _found(self, move: Move, end_s: float) -> Found:
        answers = sorted((try_.ended_s, try_) for asked in self.asked for try_ in asked.tries if try_.answered)
        after = [try_ for at, try_ in answers if move.asked_s <= at < end_s]
        first = next((try_.ended_s for try_ in after if try_.side == move.to), None)
        breaches = sum(try_.begun_s > move.refused_s.get(try_.node, float("inf")) for try_ in after if try_.side == move.old)
        times = [at for at, _ in answers]
        within = times[max(0, bisect_left(times, move.asked_s - 1.0)) : bisect_left(times, end_s)]
        gaps = [later - sooner for sooner, later in pairwise(within)]
        return Found(
            move.to,
            move.order_revision,
            _ms(move.decided_s - move.asked_s),
            None if first is None else _ms(first - move.asked_s),
            {node: _ms(at - move.asked_s) for node, at in sorted(move.refused_s.items())},
            tuple(sorted(set(self.old_nodes[move.old]) - set(move.refused_s))),
            _ms(max(gaps, default=0.0)),
            breaches,
        )


def as_json(drill: Drill) -> dict[str, Any]:
    took = sorted(asked.took_s for asked in drill.asked if not asked.lost)
    return {
        "kind": "side-failover",
        "holds": drill.holds,
        "trouble": drill.trouble,
        "deployment": drill.deployment,
        "model": drill.model,
        "seconds": round(drill.ended_s - drill.began_s, 3),
        "rate": drill.rate,
        "capacity_requests_per_s": round(drill.capacity, 3),
        "serving_side": drill.serves or None,
        "requests": {"asked": len(drill.asked), "retried": drill.retried, "lost": len(drill.lost)},
        "lost": [
            {"due_s": round(asked.due_s - drill.began_s, 3), "faults": [f"{each.node}: {each.fault}" for each in asked.tries]}
            for asked in drill.lost[:20]
        ],
        "latency_ms": {f"p{share}": _percentile_ms(took, share) for share in (50, 99, 100)},
        "failovers": [
            {
                "to": found.to,
                "order_revision": found.order_revision,
                "decided_ms": found.decided_ms,
                "recovery_ms": found.recovery_ms,
                "old_side_refused_ms": found.fenced_ms,
                "never_refused": list(found.unfenced),
                "longest_gap_ms": found.longest_gap_ms,
                "answers_after_refusal": found.breaches,
            }
            for found in drill.found
        ],
    }


def as_text(drill: Drill) -> str:
    return "\n".join(_lines(drill)) + "\n"


def _lines(drill: Drill) -> Iterator[str]:
    made = as_json(drill)
    requests, latency = made["requests"], made["latency_ms"]
    verdict = "HOLDS" if drill.holds else "DOES NOT HOLD"
    yield f"{drill.deployment}: drill of a fail-over, {made['seconds']:.0f} s at {drill.rate:.3g} requests/s   {verdict}"
    if drill.capacity:
        yield f"  load         {load_text(drill.rate, drill.capacity)}"
    if drill.trouble:
        yield f"  ended early  {printable(drill.trouble)}"
    yield f"  requests     {requests['asked']} asked, {requests['retried']} tried again on the other side, {requests['lost']} lost"
    yield f"  latency      p50 {latency['p50']} ms, p99 {latency['p99']} ms, longest {latency['p100']} ms"
    for found in drill.found:
        recovered = "never" if found.recovery_ms is None else f"{found.recovery_ms:g} ms"
        yield f"  to {found.to:<9} first answer after {recovered}, decided after {found.decided_ms:g} ms"
        yield f"               longest silence {found.longest_gap_ms:g} ms, {found.breaches} answers of nodes that had refused"
        yield from (f"               {node} refuses after {at_ms:g} ms" for node, at_ms in found.fenced_ms.items())
        yield from (f"               {node} never refused" for node in found.unfenced)
    yield from (f"  lost         at {each['due_s']:g} s: {'; '.join(each['faults'])}" for each in made["lost"][:MAX_SHOWN])
    if len(drill.lost) > MAX_SHOWN:
        yield f"  lost         … {len(drill.lost) - MAX_SHOWN} more"
    serves = f"the {drill.serves} side" if drill.serves else "unknown, the members do not say; `raftmeta status` shows it"
    yield f"  serves now   {serves}"


def load_text(rate: float, capacity: float) -> str:
    """What is asked for beside what a side is known to answer."""
    if not capacity:
        return f"asked for {rate:.3g}/s; what a side answers is not known"
    more = ", which is more than it takes" if rate > capacity else ""
    return f"asked for {rate:.3g}/s, a side answers about {capacity:.3g}/s{more}"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)


def _percentile_ms(values: Sequence[float], share: int) -> float | None:
    return _ms(values[min(len(values) - 1, len(values) * share // 100)]) if values else None
