"""`python -m tests.simulation --seeds N --first S`: run N seeds, print what happened, exit 1 at a violation or a fault that never struck.

With `--planted`, run the real code with one defect at a time instead and print which seed finds it; exit 1 when one is not found.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from tests.simulation.cluster import Cluster, Plan
from tests.simulation.faults import EXPECTED
from tests.simulation.invariants import Violation
from tests.simulation.planted import PLANTS, find

ENOUGH_SEEDS = 200  # so many must meet every kind of fault in every role


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--members", type=int, default=0, help="3 or 5 members; by default the seed decides")
    parser.add_argument("--verbose", action="store_true", help="one line per seed")
    parser.add_argument("--planted", nargs="?", const="", metavar="TEXT", help="run planted defects, those whose names hold TEXT")
    parser.add_argument("--budget", type=int, default=0, help="seeds for each planted defect; by default its own budget")
    options = parser.parse_args()
    return _seeds(options) if options.planted is None else _planted(options)


def _seeds(options: argparse.Namespace) -> int:
    began = time.process_time()
    totals: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    failed = []
    for seed in range(options.first, options.first + options.seeds):
        cluster = Cluster(Plan(seed, members=options.members or (5 if seed % 4 == 0 else 3)))
        try:
            report = cluster.run()
        except Exception as violation:  # noqa: BLE001 - every seed is told, whatever ended it
            failed.append(seed)
            print(*cluster.last_notes(), sep="\n")
            print(f"seed {seed}: {type(violation).__name__}: {violation}", flush=True)
            if not isinstance(violation, Violation):
                traceback.print_exc()
            continue
        for name in ("virtual_s", "operations", "acknowledged", "steps", "leader_changes"):
            totals[name] += getattr(report, name)
        faults.update(report.faults)
        if options.verbose:
            print(f"seed {seed}: {report.trace[:16]} {report.operations} operations, {report.leader_changes} leaders", flush=True)
    took = time.process_time() - began
    for kind, count in sorted(faults.items()):
        print(f"  {kind:32} {count:>9}")
    print(
        f"{options.seeds} seeds, {len(failed)} violations, {options.seeds / took:.2f} seeds/s, "
        f"{totals['virtual_s'] / 3600:.2f} simulated hours ({totals['virtual_s'] / took:.0f} x real time on one core), "
        f"{totals['operations']} operations, {totals['acknowledged']} answered, "
        f"{totals['leader_changes']} leader changes, {totals['steps']} steps"
    )
    unmet = [kind for kind in EXPECTED if not faults[kind]] if options.seeds >= ENOUGH_SEEDS else []
    if unmet:
        print("faults that never struck:", ", ".join(unmet))
    if failed:
        print("seeds with violations:", *failed)
    return 1 if failed or unmet else 0


def _planted(options: argparse.Namespace) -> int:
    unseen = 0
    print(f"{'defect':45} {'protects':12} {'seed':>6} {'tried':>6}  what broke")
    for plant in PLANTS:
        if options.planted in plant.name:
            found = find(plant, options.first, options.budget)
            unseen += not found.seed
            print(f"{plant.name:45} {plant.row:12} {found.seed or '-':>6} {found.tried:>6}  {found.what[:120] or 'NOT FOUND'}", flush=True)
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
