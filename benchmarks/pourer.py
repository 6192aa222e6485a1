"""A process that stages a version again and again while it is told to: `python -m benchmarks.pourer MIB`, then `on` and `off` by line.

It stages as control does beside requests: threads that run only on idle processors, within the default share of the memory's speed, from
blobs in the page cache into an arena. `off` is answered with how many versions were staged since `on`.
"""

from __future__ import annotations

import sys
import threading

from benchmarks.weights import filled, places
from consistency import vector
from node_agent.budget import DEFAULT_SHARE, Budget, memory_speed
from node_agent.pour import Pace
from node_agent.staging import Manner

TENSORS = 32
THREADS = 2


def main(size_mib: int) -> None:
    vector.backend()
    budget = Budget(DEFAULT_SHARE * memory_speed())
    goes, over = threading.Event(), threading.Event()
    count = 0
    with places() as (directory, arena_dir):
        bench, manifest = filled(directory, arena_dir, size_mib, TENSORS)

        def pour() -> None:
            nonlocal count
            while not over.is_set():
                if goes.wait(0.05):
                    bench.forget(0)
                    bench.stage(manifest, 0, how=Manner(Pace(THREADS, idle=True, budget=budget)))
                    count += 1

        thread = threading.Thread(target=pour)
        thread.start()
        print(f"{budget.bytes_per_s / 1e9:.2f} GB/s", flush=True)
        for line in sys.stdin:
            if line.strip() == "on":
                count = 0
                goes.set()
                print("on", flush=True)
            else:
                goes.clear()
                print(count, flush=True)
        over.set()
        thread.join()
        bench.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
