"""Steps of a run on a device: each is done, skipped with a reason, or failed; the run ends in time and says all of it in one table."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

INCOMPLETE = 2  # as the checker's: nothing failed, and something was not looked at


class Skipped(Exception):
    """The reason, as people will read it."""


class Step(NamedTuple):
    name: str
    work: Callable[[], str]  # gives what it found


class Result(NamedTuple):
    name: str
    state: str  # ok | SKIPPED | FAILED
    detail: str
    took_s: float


def run(
    steps: Sequence[Step], limit_s: float, clock: Callable[[], float] = time.monotonic, say: Callable[[str], None] = print
) -> list[Result]:
    """Every step, as long as there is time to begin one. A failed step keeps nobody from trying the next."""
    begin, results = clock(), []
    for step in steps:
        started = clock()
        result = _one(step, started - begin >= limit_s, limit_s)
        results.append(result._replace(took_s=clock() - started))
        say(f"{result.state:8}{step.name}: {result.detail}")
    return results


def table(results: Sequence[Result]) -> str:
    wide = max((len(result.name) for result in results), default=0)
    lines = [f"{result.name:{wide}}  {result.state:7}  {result.took_s:6.1f} s  {result.detail}" for result in results]
    skipped = [result.name for result in results if result.state == "SKIPPED"]
    failed = [result.name for result in results if result.state == "FAILED"]
    if skipped:
        lines.append(f"NOT LOOKED AT ({len(skipped)} of {len(results)}): {', '.join(skipped)}. CUDA stays unproven on a device.")
    if failed:
        lines.append(f"FAILED: {', '.join(failed)}")
    if not skipped and not failed:
        lines.append("everything was looked at and held")
    return "\n".join(lines)


def status(results: Sequence[Result]) -> int:
    states = {result.state for result in results}
    return 1 if "FAILED" in states or not results else INCOMPLETE if "SKIPPED" in states else 0


def _one(step: Step, late: bool, limit_s: float) -> Result:
    if late:
        return Result(step.name, "SKIPPED", f"the {limit_s:g} s of this run were over", 0.0)
    try:
        return Result(step.name, "ok", step.work(), 0.0)
    except Skipped as skipped:
        return Result(step.name, "SKIPPED", str(skipped), 0.0)
    except Exception as fault:  # noqa: BLE001 the outermost loop: one step's defect is its own
        traceback.print_exc()
        return Result(step.name, "FAILED", f"{type(fault).__name__}: {fault}".partition("\n")[0][:200], 0.0)
