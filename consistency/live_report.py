"""What live probes found, as text for people, as JSON for programs and the record. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from consistency.findings import CONSISTENT, DIVERGED, INCOMPLETE
from consistency.live import Kept, Kind, Ledger
from consistency.report import MAX_RECORD_BYTES
from raftmeta.cli.output import printable

MAX_SHOWN = 5
MAX_RECORDED = 10  # of the samples that are kept
MAX_ROWS_RECORDED = 64  # of one of them


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
    refused: str = ""  # why it ended by itself


def verdict(ran: Ran) -> str:
    """Any difference makes `diverged`; too little compared, or a node of which nothing was, makes `incomplete`."""
    ledger = ran.ledger
    if ledger.kept or ledger.dropped:
        return DIVERGED
    return CONSISTENT if not ran.refused and not ledger.uncompared and ledger.coverage >= ran.least_coverage else INCOMPLETE


def line(ran: Ran) -> str:
    """Where it stands, while it goes on."""
    ledger = ran.ledger
    within = "nothing compared yet" if ledger.within is None else f"{100 * ledger.within:.3f} % within tolerance"
    return f"{ran.deployment}: {ledger.asked} samples, {100 * ledger.coverage:.1f} % compared, {within}, {ledger.beyond} beyond"


def as_json(ran: Ran, kept: Sequence[Kept] | None = None) -> dict[str, Any]:
    """`kept`: the samples to show, all of them without it."""
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
        "unanswered_because": dict(sorted(ledger.silence.items())),
        "refused": ran.refused,
        "actions": list(ran.actions),
        "kept": [each.as_json() for each in (ledger.kept if kept is None else kept)],
        "dropped": ledger.dropped,
    }


def for_record(ran: Ran) -> dict[str, Any]:
    """With as much as the log takes of what has no bound, the newest samples last to go: `cut` counts what was left out of each part."""
    made = as_json(ran, [])
    del made["unanswered_because"], made["refused"]  # for who ran it
    samples = [each.as_json() for each in list(ran.ledger.kept)[-MAX_RECORDED:]]
    cut: Counter[str] = Counter({"kept": len(ran.ledger.kept) - len(samples)})
    for sample in samples:
        cut["rows"] += max(0, len(sample["rows"]) - MAX_ROWS_RECORDED)
        sample["rows"] = sample["rows"][:MAX_ROWS_RECORDED]
    made |= {"kept": samples, "cut": cut}
    least = (("kept", 1), ("actions", 0), ("not_compared", 0), ("unanswered", 0), ("kept", 0))
    for step in (_without_bodies, *(_halving(part, left) for part, left in least)):
        while len(json.dumps(made)) > MAX_RECORD_BYTES and step(made):
            pass
    return made | {"cut": {part: count for part, count in sorted(cut.items()) if count}}


def _without_bodies(made: dict[str, Any]) -> bool:
    """Leave out the body of one sample, the oldest first; it can be known again by its digest. False when there is none."""
    for sample in made["kept"]:
        if sample["body"]:
            sample["body"] = ""
            made["cut"]["bodies"] += 1
            return True
    return False


def _halving(part: str, least: int) -> Callable[[dict[str, Any]], bool]:
    """Keep the newer, or more frequent, half of a part. The step is False when the part is at its least."""

    def step(made: dict[str, Any]) -> bool:
        found = made[part]
        if len(found) <= least:
            return False
        count = len(found) // 2
        made["cut"][part] += len(found) - count
        if isinstance(found, dict):
            made[part] = dict(sorted(Counter(found).most_common(count)))
        else:
            made[part] = found[len(found) - count :]
        return True

    return step


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
        yield f"  unanswered   {printable(node)}: {count}; the first time: {printable(ledger.silence.get(node, 'unknown'))}"
    if ran.refused:
        yield f"  ended early  {printable(ran.refused)}"
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
