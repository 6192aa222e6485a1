"""What live probes found, as text for people, as JSON for programs and the record. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from consistency.findings import CONSISTENT, DIVERGED, INCOMPLETE
from consistency.live import Kept, Kind, Ledger
from raftmeta.cli.output import printable

MAX_SHOWN = 5
MAX_RECORDED = 10  # of the samples that are kept


class Ran(NamedTuple):
    """One run so far."""

    deployment: str
    model: str
    seconds: float
    rate: float  # samples a second that were wanted
    capacity: float  # of the smaller side in requests a second, 0 unknown
    skipped: int
    sources: int  # questions that there are, 0: drawn without end
    least_coverage: float
    ledger: Ledger
    actions: Sequence[str]


def verdict(ran: Ran) -> str:
    """Any difference makes `diverged`; too little compared, or a node of which nothing was, makes `incomplete`."""
    ledger = ran.ledger
    if ledger.kept or ledger.dropped:
        return DIVERGED
    return CONSISTENT if not ledger.uncompared and ledger.coverage >= ran.least_coverage else INCOMPLETE


def line(ran: Ran) -> str:
    """Where it stands, while it goes on."""
    ledger = ran.ledger
    within = "nothing compared yet" if ledger.within is None else f"{100 * ledger.within:.3f} % within tolerance"
    return f"{ran.deployment}: {ledger.asked} samples, {100 * ledger.coverage:.1f} % compared, {within}, {ledger.beyond} beyond"


def as_json(ran: Ran, kept: int | None = None) -> dict[str, Any]:
    ledger = ran.ledger
    covered, pairs = ledger.pairs_covered
    return {
        "kind": "live",
        "verdict": verdict(ran),
        "deployment": ran.deployment,
        "model": ran.model,
        "seconds": round(ran.seconds, 3),
        "rate": ran.rate,
        "capacity_requests_per_s": round(ran.capacity, 3),
        "samples": {"asked": ledger.asked, "skipped": ran.skipped} | {kind.value: ledger.samples[kind] for kind in Kind},
        "coverage": round(ledger.coverage, 6),
        "within_tolerance": None if ledger.within is None else round(ledger.within, 6),
        "beyond": ledger.beyond,
        "pairs": {"covered": covered, "of": pairs},
        "questions": {"covered": len(ledger.questions), "of": ran.sources or None},
        "not_compared": list(ledger.uncompared),
        "unanswered": dict(sorted(ledger.faults.items())),
        "actions": list(ran.actions),
        "kept": [each.as_json() for each in list(ledger.kept)[-(kept or len(ledger.kept)) :]] if ledger.kept else [],
        "dropped": ledger.dropped,
    }


def for_record(ran: Ran) -> dict[str, Any]:
    """With as many of the newest samples as the log takes beside everything else."""
    return as_json(ran, MAX_RECORDED)


def as_text(ran: Ran) -> str:
    return "\n".join(_lines(ran)) + "\n"


def _lines(ran: Ran) -> Iterator[str]:
    ledger, samples = ran.ledger, ran.ledger.samples
    yield f"{printable(ran.deployment)}: live probes of model {printable(ran.model)} for {ran.seconds:.0f} s   {verdict(ran).upper()}"
    share = f", capacity about {ran.capacity:.0f} requests/s a side" if ran.capacity else ""
    yield f"  asked        {ledger.asked} samples at {ran.rate:g}/s{share}; {ran.skipped} were due and not asked"
    switching, unanswered = samples[Kind.SWITCHING], samples[Kind.UNANSWERED]
    yield f"  compared     {samples[Kind.COMPARED]} ({100 * ledger.coverage:.2f} %), {switching} during a switch, {unanswered} unanswered"
    within = "nothing was compared" if ledger.within is None else f"{100 * ledger.within:.4f} %, {ledger.beyond} beyond"
    yield f"  within       {within}"
    covered, pairs = ledger.pairs_covered
    questions = f"{len(ledger.questions)} of {ran.sources}" if ran.sources else "drawn"
    yield f"  coverage     {covered} of {pairs} pairs of nodes, questions {questions}"
    if ledger.uncompared:
        yield f"  not compared {', '.join(map(printable, ledger.uncompared))}"
    for node, count in sorted(ledger.faults.items()):
        yield f"  unanswered   {printable(node)}: {count}"
    for action in ran.actions:
        yield f"  done         {printable(action)}"
    for each in list(ledger.kept)[-MAX_SHOWN:]:
        yield f"  differs      {_said(each)}"
    hidden = len(ledger.kept) + ledger.dropped - min(MAX_SHOWN, len(ledger.kept))
    if hidden:
        yield f"  and {hidden} more; --json shows the last {len(ledger.kept)}"


def _said(kept: Kept) -> str:
    judged = kept.judgement
    rows = f", samples {', '.join(map(str, judged.beyond[:5]))}" if judged.beyond else ""
    who = f"{kept.primary.node} and {kept.standby.node}, question {kept.question}{rows}"
    return printable(f"{who}: {judged.detail} (worst {judged.worst:.3g}, limit {judged.limit:g})")
