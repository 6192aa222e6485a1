"""What one run of the check ends with, as text, as JSON, and as one exit status. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from consistency import report, textfile
from consistency.findings import CONSISTENT, EXIT_STATUS, INCOMPLETE, Verdict, worst
from raftmeta.cli import output
from raftmeta.core.naming import named


class Fault(NamedTuple):
    """Why there are no verdicts."""

    code: str
    detail: str
    hint: str


@dataclass(frozen=True)
class Outcome:
    verdicts: tuple[Verdict, ...]
    not_recorded: tuple[str, ...] = ()  # "deployment: why"
    duration_s: float = 0.0
    completed_ms: int = 0  # wall clock
    fault: Fault | None = None
    idle: tuple[str, ...] = ()  # deployments that were left out: nothing was activated yet

    @property
    def verdict(self) -> str:
        return INCOMPLETE if self.fault is not None else worst([item.verdict for item in self.verdicts])

    @property
    def exit_status(self) -> int:
        """Never 1 without a difference that was seen: what members refuse or cannot answer leaves the check incomplete."""
        return EXIT_STATUS[self.verdict]


def as_json(outcome: Outcome) -> dict[str, Any]:
    made: dict[str, Any] = {
        "verdict": outcome.verdict,
        "exit": outcome.exit_status,
        "deployments": [report.as_json(item) for item in outcome.verdicts],
        "not_recorded": list(outcome.not_recorded),
        "nothing_active": list(outcome.idle),
        "duration_s": round(outcome.duration_s, 3),
        "completed_ms": outcome.completed_ms,
    }
    return made | ({} if outcome.fault is None else {"error": outcome.fault._asdict()})


def as_text(outcome: Outcome, width: int = report.WIDTH) -> str:
    if outcome.fault is not None:
        return fault_text(outcome.fault)
    parts = [report.as_text(item, width) for item in outcome.verdicts]
    if len(parts) > 1:
        parts.append("".join(report.summary(item) + "\n" for item in outcome.verdicts))
    if not parts:
        parts.append(f"no deployment {'serves anything' if outcome.idle else 'is declared'}, so nothing was compared\n")
    if outcome.idle:
        parts.append(f"left out, nothing was activated yet: {output.printable(named(outcome.idle))}\n")
    parts += [f"not recorded: {output.printable(why)}\n" for why in outcome.not_recorded]
    return "\n".join(parts)


def fault_text(fault: Fault) -> str:
    return f"INCOMPLETE: {output.printable(fault.detail)} ({fault.code})\nhint:  {fault.hint}\n"


def as_junit(outcome: Outcome) -> bytes:
    from consistency import junit  # and with it the XML library, which few runs need

    fault = "" if outcome.fault is None else f"{outcome.fault.code}: {outcome.fault.detail}"
    return junit.document(outcome.verdicts, outcome.duration_s, fault)


def as_textfile(outcome: Outcome) -> bytes:
    run = textfile.Run(outcome.exit_status, outcome.duration_s, outcome.completed_ms, len(outcome.not_recorded))
    return textfile.page(outcome.verdicts, run)


class Changes:
    """What is new in one round of a repeated check: a line for each verdict that changed, its report unless it is consistent."""

    def __init__(self) -> None:
        self._last: dict[str, object] = {}

    def of(self, outcome: Outcome) -> tuple[Sequence[Verdict], bool]:
        """The verdicts that changed, and whether a fault came that was not told yet."""
        if outcome.fault is not None:
            is_new_fault = self._last != {"": outcome.fault.code}
            self._last = {"": outcome.fault.code}  # once it is over, every verdict is news
            return (), is_new_fault
        self._last.pop("", None)
        changed = [item for item in outcome.verdicts if self._last.get(item.deployment) != _signature(item)]
        self._last.update({item.deployment: _signature(item) for item in outcome.verdicts})
        return changed, False

    def text(self, outcome: Outcome, width: int = report.WIDTH) -> str:
        """ "" when nothing is new."""
        changed, is_new_fault = self.of(outcome)
        clock = output.clock(outcome.completed_ms)
        lines = [f"{clock}  {report.summary(item)}\n" + _indented(item, width) for item in changed]
        if is_new_fault:
            assert outcome.fault is not None
            lines.append(f"{clock}  {fault_text(outcome.fault)}")
        return "".join(lines)


def _indented(verdict: Verdict, width: int) -> str:
    return "" if verdict.verdict == CONSISTENT else "\n" + report.as_text(verdict, width) + "\n"


def _signature(verdict: Verdict) -> object:
    """What makes a verdict another one; ages and lags do not."""
    gaps = [(reason.code, reason.node) for reason in (*verdict.reasons, *verdict.unseen)]
    found = [(item.code, item.node, item.tensor, item.block, item.found) for item in verdict.findings if item.code != "lag"]
    return verdict.verdict, verdict.version, verdict.order_revision, verdict.findings_total, gaps, found
