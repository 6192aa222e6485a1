"""`python -m tests.simulation --seeds N --first S`: run N seeds, print what happened, exit 1 at the first violation."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from tests.simulation.cluster import Cluster, Plan
from tests.simulation.invariants import Violation


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--members", type=int, default=0, help="3 or 5 members; by default the seed decides")
    parser.add_argument("--verbose", action="store_true", help="one line per seed")
    options = parser.parse_args()
    began = time.perf_counter()
    totals: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    failed = []
    for seed in range(options.first, options.first + options.seeds):
        try:
            report = Cluster(Plan(seed, members=options.members or (5 if seed % 4 == 0 else 3))).run()
        except Exception as violation:  # noqa: BLE001 - every seed is told, whatever ended it
            failed.append(seed)
            print(f"seed {seed}: {type(violation).__name__}: {violation}", flush=True)
            if not isinstance(violation, Violation):
                traceback.print_exc()
            continue
        for name in ("virtual_s", "operations", "acknowledged", "steps", "leader_changes"):
            totals[name] += getattr(report, name)
        faults.update(report.faults)
        if options.verbose:
            print(f"seed {seed}: {report.trace[:16]} {report.operations} operations, {report.leader_changes} leaders", flush=True)
    took = time.perf_counter() - began
    for kind, count in sorted(faults.items()):
        print(f"  {kind:32} {count:>9}")
    print(
        f"{options.seeds} seeds, {len(failed)} violations, {options.seeds / took:.2f} seeds/s, "
        f"{totals['virtual_s'] / 3600:.2f} simulated hours ({totals['virtual_s'] / took:.0f} x real time), "
        f"{totals['operations']} operations, {totals['acknowledged']} answered, "
        f"{totals['leader_changes']} leader changes, {totals['steps']} steps"
    )
    if failed:
        print("seeds with violations:", *failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
