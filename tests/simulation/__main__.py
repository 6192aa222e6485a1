"""`python -m tests.simulation --seeds N --first S`: run N seeds, print what happened, exit 1 at a violation or a fault that never struck.

With `--planted`, run the real code with one defect at a time instead and print which seed finds it; exit 1 when one is not found.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from tests.simulation.cluster import Cluster, Plan, Report
from tests.simulation.faults import EXPECTED
from tests.simulation.invariants import Violation
from tests.simulation.planted import PLANTS, Found, find

ENOUGH_SEEDS = 200  # so many must meet every kind of fault in every role


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run seeds side by side")
    parser.add_argument("--members", type=int, default=0, help="3 or 5 members; by default the seed decides")
    parser.add_argument("--stormy", type=float, default=30.0, metavar="S", help="virtual seconds with faults")
    parser.add_argument(
        "--calm", type=float, default=30.0, metavar="S", help="and without, until everything must have converged; at least 18"
    )
    parser.add_argument("--feature", type=int, default=1, metavar="LEVEL", help="feature level at which the clusters begin")
    parser.add_argument("--verbose", action="store_true", help="one line per seed")
    parser.add_argument("--planted", nargs="?", const="", metavar="TEXT", help="run planted defects, those whose names hold TEXT")
    parser.add_argument("--budget", type=int, default=0, help="seeds for each planted defect; by default its own budget")
    options = parser.parse_args()
    return _seeds(options) if options.planted is None else _planted(options)


@dataclass
class Ran:
    """One seed: its report, or why it has none."""

    seed: int
    cpu_s: float
    report: Report | None
    trouble: str = ""


@dataclass
class Totals:
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    failed: list[int] = field(default_factory=list)
    cpu_s: float = 0.0

    def add(self, ran: Ran) -> None:
        self.cpu_s += ran.cpu_s
        if ran.report is None:
            self.failed.append(ran.seed)
            return
        for name in ("virtual_s", "operations", "acknowledged", "steps", "leader_changes"):
            self.counts[name] += getattr(ran.report, name)
        self.faults.update(ran.report.faults)


def _plan(seed: int, options: argparse.Namespace) -> Plan:
    members = options.members or (5 if seed % 4 == 0 else 3)
    return Plan(seed, members=members, stormy_s=options.stormy, calm_s=options.calm, feature=options.feature)


def _run(plan: Plan) -> Ran:
    began = time.process_time()
    cluster = Cluster(plan)
    try:
        report = cluster.run()
        return Ran(plan.seed, time.process_time() - began, report)
    except Exception as violation:  # noqa: BLE001 - every seed is told, whatever ended it
        lines = [*cluster.last_notes(), f"seed {plan.seed}: {type(violation).__name__}: {violation}"]
        if not isinstance(violation, Violation):
            lines.append(traceback.format_exc())
        return Ran(plan.seed, time.process_time() - began, None, "\n".join(lines))


def _all(plans: list[Plan], jobs: int) -> Iterator[Ran]:
    if jobs == 1:
        yield from map(_run, plans)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(_run, plans, chunksize=4)


def _seeds(options: argparse.Namespace) -> int:
    began = time.monotonic()
    totals = Totals()
    for ran in _all([_plan(seed, options) for seed in range(options.first, options.first + options.seeds)], options.jobs):
        totals.add(ran)
        if ran.report is None:
            print(ran.trouble, flush=True)
        elif options.verbose:
            report = ran.report
            print(f"seed {ran.seed}: {report.trace[:16]} {report.operations} operations, {report.leader_changes} leaders", flush=True)
    return _tell(options.seeds, totals, time.monotonic() - began)


def _tell(seeds: int, totals: Totals, took_s: float) -> int:
    counts, faults = totals.counts, totals.faults
    for kind, count in sorted(faults.items()):
        print(f"  {kind:32} {count:>9}")
    print(
        f"{seeds} seeds, {len(totals.failed)} violations, {took_s:.0f} s, {seeds / totals.cpu_s:.2f} seeds/s on one core, "
        f"{counts['virtual_s'] / 3600:.2f} simulated hours ({counts['virtual_s'] / totals.cpu_s:.0f} x real time on one core), "
        f"{counts['operations']} operations, {counts['acknowledged']} answered, "
        f"{counts['leader_changes']} leader changes, {counts['steps']} steps"
    )
    unmet = [kind for kind in EXPECTED if not faults[kind]] if seeds >= ENOUGH_SEEDS else []
    if unmet:
        print("faults that never struck:", ", ".join(unmet))
    if totals.failed:
        print("seeds with violations:", *totals.failed)
    return 1 if totals.failed or unmet else 0


def _planted(options: argparse.Namespace) -> int:
    unseen = 0
    chosen = [plant for plant in PLANTS if options.planted in plant.name]
    print(f"{'defect':45} {'protects':12} {'seed':>6} {'tried':>6}  what broke")
    with ProcessPoolExecutor(options.jobs) as pool:
        tasks = [(plant.name, options.first, options.budget) for plant in chosen]
        for plant, found in zip(chosen, pool.map(_find, tasks), strict=True):
            unseen += not found.seed
            what = found.what[:120] or "NOT FOUND"
            print(f"{plant.name:45} {plant.row:12} {found.seed or '-':>6} {found.tried:>6}  {what}", flush=True)
    return 1 if unseen else 0


def _find(wanted: tuple[str, int, int]) -> Found:
    """In a process of its own: a plant holds functions, so it is named, not sent."""
    name, first, budget = wanted
    (plant,) = [plant for plant in PLANTS if plant.name == name]
    return find(plant, first, budget)


if __name__ == "__main__":
    sys.exit(main())
