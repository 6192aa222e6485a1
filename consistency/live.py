"""Live probes: what two sides that serve answered to the same question, and what that says about them. Pure.

Answers are compared only where the same version computed them. Where the versions differ, what each node had applied decides: one that is
behind, or in the middle of a switch, is about to serve the other version, and nothing is wrong unless that lasts; two that have applied the
same and serve different versions contradict each other. Rows of a batch are samples of their own. What is beyond tolerance is kept with all
that it takes to ask again, and the order that was known when it was asked, in a queue that forgets the oldest.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from consistency.applied import Applied, Relation, relation
from consistency.inference import Output
from consistency.nearness import Flags, cosines, default_limit, divergences, relative_errors

MEMBERS = "members"  # in place of a node
MAX_KEPT = 100  # samples beyond tolerance
MAX_SILENCE = 600  # characters of why a node did not answer
MAX_KEPT_BODY = 16 << 10  # bytes of a kept question


class Question(NamedTuple):
    """One request, for both sides."""

    name: str  # of the probe or line that it comes from
    body: bytes
    rows: int  # samples in it
    measure: str
    limit: float = 0.0  # 0: the default of the measure and dtypes


class Heard(NamedTuple):
    """What one node answered. `outputs` None: no answer, and `fault` says why."""

    node: str
    version: str
    applied: Applied
    outputs: tuple[Output, ...] | None
    fault: str = ""  # also why it could not be looked at after an answer; then it is not settled
    settled: bool = True  # it had applied the same before the question and after the answer, and served this version by then


class Order(NamedTuple):
    """What the members had ordered by a revision."""

    generation: int
    order_revision: int
    version: str
    revision: int  # of the state that says so
    in_flight: bool = False  # not obeyed everywhere by then

    @property
    def basis(self) -> dict[str, Any]:
        """Of a verdict on what was seen from then on."""
        return {
            "generation": self.generation,
            "order_revision": self.order_revision,
            "version": self.version,
            "started_revision": self.revision,
        }


class Moment(NamedTuple):
    """When a sample was judged, and under which order it was asked."""

    now_s: float  # monotonic
    at_ms: int = 0  # of the clock
    order: Order | None = None  # None: the members did not say


class Kind(StrEnum):
    COMPARED = "compared"
    SWITCHING = "switching"  # one side is about to serve the version of the other
    UNANSWERED = "unanswered"
    CONTRADICTION = "contradiction"  # both applied the same, and serve different versions
    CONCURRENT = "concurrent"  # each applied what the other did not


class Judgement(NamedTuple):
    kind: Kind
    beyond: tuple[int, ...] = ()  # rows that are not within tolerance
    worst: float = 0.0  # of the measure
    limit: float = 0.0
    output: str = ""  # that has the worst row
    detail: str = ""
    silent: str = ""  # who did not answer
    late: tuple[str, ...] = ()  # nodes that are about to serve the version of the other


def judge(question: Question, primary: Heard, standby: Heard, dtypes: Sequence[str]) -> Judgement:
    """`dtypes`: of the tensors of the version that both serve, names of safetensors."""
    if primary.outputs is None or standby.outputs is None:
        silent = primary if primary.outputs is None else standby
        return Judgement(Kind.UNANSWERED, detail=f"{silent.node}: {silent.fault}", silent=silent.node)
    if primary.version != standby.version:
        return _other_versions(primary, standby)
    return _compare(question, primary.outputs, standby.outputs, dtypes)


def _other_versions(primary: Heard, standby: Heard) -> Judgement:
    who = f"{primary.node} answers with {primary.version}, {standby.node} with {standby.version}"
    moving = tuple(heard.node for heard in (primary, standby) if not heard.settled)
    if moving:
        unknown = "".join(f"; {heard.node} does not say what it has applied: {heard.fault}" for heard in (primary, standby) if heard.fault)
        what = f"{who}{unknown}; {' and '.join(moving)} switched meanwhile, or is about to"
        return Judgement(Kind.SWITCHING, detail=what, late=moving)
    match relation(primary.applied, standby.applied):
        case Relation.EQUAL:
            return Judgement(Kind.CONTRADICTION, detail=f"{who}, and both have applied the same orders")
        case Relation.CONCURRENT:
            return Judgement(Kind.CONCURRENT, detail=f"{who}; each has applied an order that the other has not")
        case Relation.BEHIND:
            return Judgement(Kind.SWITCHING, detail=f"{who}; {primary.node} is behind", late=(primary.node,))
        case Relation.AHEAD:
            return Judgement(Kind.SWITCHING, detail=f"{who}; {standby.node} is behind", late=(standby.node,))


def _compare(question: Question, want: tuple[Output, ...], got: tuple[Output, ...], dtypes: Sequence[str]) -> Judgement:
    all_rows = tuple(range(question.rows))
    if [(out.name, out.datatype, out.shape) for out in want] != [(out.name, out.datatype, out.shape) for out in got]:
        return Judgement(Kind.COMPARED, all_rows, detail="the sides answer with outputs of other names, datatypes or shapes")
    found = [_compare_output(question, mine, other, dtypes) for mine, other in zip(want, got, strict=True)]
    beyond = sorted({row for judged in found for row in judged.beyond})
    first = next((judged for judged in found if judged.beyond), found[0])
    return first._replace(beyond=tuple(beyond))


def _compare_output(question: Question, want: Output, got: Output, dtypes: Sequence[str]) -> Judgement:
    found = _measured(question, want, got, dtypes)
    rows = _rows_of(found.bad, question.rows)
    return Judgement(Kind.COMPARED, rows, found.worst, found.limit, want.name, f"output {want.name}: {found.note}" if rows else "")


class _Measured(NamedTuple):
    bad: Flags  # of whatever was compared, in order
    worst: float
    limit: float
    note: str  # what is said of the bad ones


def _measured(question: Question, want: Output, got: Output, dtypes: Sequence[str]) -> _Measured:
    if isinstance(want.values, tuple) or isinstance(got.values, tuple):
        return _exactly(np.array([mine != other for mine, other in zip(want.values, got.values, strict=True)], np.bool_), "other texts")
    if want.values.dtype.kind != "f":
        return _exactly((want.values != got.values).reshape(-1), "other whole numbers")
    infinite = ~(np.isfinite(want.values) & np.isfinite(got.values)).reshape(-1)
    if infinite.any():
        return _Measured(infinite, float("inf"), 0.0, "a value that is not finite")
    measure = question.measure if want.values.ndim >= 2 else "close"  # the others need rows
    # the question's limit is one of its own measure: a least cosine is no relative error
    limit = (question.limit if measure == question.measure else 0.0) or default_limit(measure, want.datatype, dtypes)
    mine, other = want.values.astype(np.float64), got.values.astype(np.float64)
    match measure:
        case "cosine":
            values = cosines(mine, other)
            return _Measured(~(values >= limit), float(values.min(initial=1.0)), limit, f"cosine below {limit:g}")
        case "logits":
            values, is_other = divergences(mine, other)
            note = f"another first choice, or more than {limit:g} nats"
            return _Measured(~(values <= limit) | is_other, float(values.max(initial=0.0)), limit, note)
        case _:
            values = relative_errors(mine, other)
            return _Measured(
                ~(values <= limit), float(values.max(initial=0.0)), limit, f"apart by more than {limit:g} of the largest value"
            )


def _exactly(differs: Flags, note: str) -> _Measured:
    return _Measured(differs, float(differs.any()), 0.0, note)


def _rows_of(bad: Flags, rows: int) -> tuple[int, ...]:
    """The samples that the flags belong to, which lie in order; all of them where flags cannot be shared out."""
    if not bad.any():
        return ()
    if len(bad) % rows:
        return tuple(range(rows))
    return tuple(np.flatnonzero(bad.reshape(rows, -1).any(axis=1)).tolist())


def _listed(applied: Applied) -> dict[str, list[int]]:
    return {plane: list(order) for plane, order in sorted(applied.items())}


@dataclass(frozen=True)
class Kept:
    """A sample beyond tolerance, with what it takes to ask again."""

    at_ms: int
    question: str
    body_sha256: str
    body: str  # the whole request unless it is long, then ""
    judgement: Judgement
    primary: Heard
    standby: Heard
    order: Order | None = None  # known when it was asked

    def as_json(self) -> dict[str, Any]:
        judged = self.judgement
        return {
            "at_ms": self.at_ms,
            "question": self.question,
            "body_sha256": self.body_sha256,
            "body": self.body,
            "order": None if self.order is None else self.order.basis,
            "kind": judged.kind.value,
            "rows": list(judged.beyond),
            "output": judged.output,
            "worst": judged.worst if np.isfinite(judged.worst) else None,
            "limit": judged.limit,
            "detail": judged.detail,
            "sides": [
                {
                    "node": heard.node,
                    "version": heard.version,
                    "applied": _listed(heard.applied),
                }
                for heard in (self.primary, self.standby)
            ],
        }


class _Late(NamedTuple):
    """How a node stood when it was first seen to be late: the time runs for as long as it stands so."""

    version: str
    applied: Applied
    since_s: float  # monotonic


@dataclass
class Ledger:
    """All judgements so far. Counts are samples, that is rows; `lag_s`: how long a side may be behind."""

    nodes: Mapping[str, Sequence[str]]  # side -> nodes
    lag_s: float = 10.0
    samples: Counter[Kind] = field(default_factory=Counter)
    beyond: int = 0
    kept: deque[Kept] = field(default_factory=lambda: deque(maxlen=MAX_KEPT))
    dropped: int = 0  # from the queue, oldest first
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)  # compared samples by (primary, standby)
    questions: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)  # unanswered, by who was silent
    silence: dict[str, str] = field(default_factory=dict)  # why, the first time, by who was silent
    late: dict[tuple[str, bool], _Late] = field(default_factory=dict)  # by node, and whether it was settled

    def add(self, question: Question, primary: Heard, standby: Heard, judged: Judgement, moment: Moment) -> Judgement | None:
        """The difference that somebody should act on, if it is one by now."""
        self.samples[judged.kind] += question.rows
        pair = (primary.node, standby.node)
        if judged.kind is Kind.UNANSWERED:
            self.faults[judged.silent] += question.rows
            self.silence.setdefault(judged.silent, judged.detail.removeprefix(f"{judged.silent}: ")[:MAX_SILENCE])
            return None
        if judged.kind is Kind.SWITCHING:
            passed_s = max(self._late_for(heard, moment.now_s) for heard in (primary, standby) if heard.node in judged.late)
            if passed_s <= self.lag_s:
                return None
            judged = judged._replace(detail=f"{judged.detail} for {passed_s:.0f} s, {self.lag_s:g} s are allowed")
        if judged.kind is Kind.COMPARED:
            self._level(primary, standby)
            self.pairs[pair] += question.rows
            self.questions[question.name] += question.rows
            self.beyond += len(judged.beyond)
            if not judged.beyond:
                return None
        self.keep(question, primary, standby, judged, moment)
        return judged

    def looked(self, node: str, applied: Applied) -> None:
        """A node says what it has applied: where that is something else it is late no longer."""
        for key in ((node, True), (node, False)):
            if key in self.late and self.late[key].applied != applied:
                del self.late[key]

    def _late_for(self, heard: Heard, now_s: float) -> float:
        """Seconds for which the node has been late as it stands."""
        key = heard.node, heard.settled
        since = self.late.get(key)
        if since is None or (since.version, since.applied) != (heard.version, heard.applied):
            since = self.late[key] = _Late(heard.version, heard.applied, now_s)
        return now_s - since.since_s

    def _level(self, primary: Heard, standby: Heard) -> None:
        """Both serve the same version.

        One that stands as it did is behind for as long as it has been, whomever it is compared with: orders are never taken back. Of one in
        the middle of a switch that is not known, unless the other one is late as well.
        """
        known = {node for node, _ in self.late}
        for heard, other in ((primary, standby), (standby, primary)):
            for settled in (True, False):
                since = self.late.get((heard.node, settled))
                if since is not None and (since.version != heard.version or not (settled or other.node in known)):
                    del self.late[heard.node, settled]

    def keep(self, question: Question, primary: Heard, standby: Heard, judged: Judgement, moment: Moment) -> None:
        self.dropped += len(self.kept) == self.kept.maxlen
        digest = hashlib.sha256(question.body).hexdigest()
        body = question.body.decode("utf-8", "replace") if len(question.body) <= MAX_KEPT_BODY else ""
        first, second = (side._replace(outputs=None) for side in (primary, standby))
        self.kept.append(Kept(moment.at_ms, question.name, digest, body, judged, first, second, moment.order))

    @property
    def asked(self) -> int:
        return self.samples.total()

    @property
    def coverage(self) -> float:
        """Share of the samples that could be compared."""
        return self.samples[Kind.COMPARED] / self.asked if self.asked else 0.0

    @property
    def within(self) -> float | None:
        """Share of the compared samples that are within tolerance."""
        compared = self.samples[Kind.COMPARED]
        return None if not compared else 1.0 - self.beyond / compared

    @property
    def pairs_covered(self) -> tuple[int, int]:
        """Pairs of a node of each side that were compared, of all."""
        return len(self.pairs), len(self.nodes["primary"]) * len(self.nodes["standby"])

    @property
    def uncompared(self) -> tuple[str, ...]:
        """Nodes of which no sample was compared."""
        seen = {node for pair in self.pairs for node in pair}
        return tuple(node for nodes in self.nodes.values() for node in nodes if node not in seen)
