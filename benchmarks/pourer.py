"""A process that works on a version again and again while it is told to: `python -m benchmarks.pourer MIB stage|scrub`, then on and off.

It does so as control does beside requests: threads that run only on idle processors, within the default share of the memory's speed.
`stage` pours it from blobs in the page cache into an arena; `scrub` reads it there in the order of a pass, run after run without a pause,
as after damage. `off` is answered with how often that was done as a whole since `on`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from benchmarks.weights import Bench, filled, places
from consistency import vector
from consistency.vector import BLOCK_BYTES
from node_agent.budget import DEFAULT_SHARE, Budget, memory_speed
from node_agent.pour import Pace
from node_agent.scrub import Order, wrong_blocks
from node_agent.scrubbing import idle_thread
from node_agent.staging import Manner
from raftmeta.core.manifest import Manifest

TENSORS = 32
THREADS = 2


def staged(bench: Bench, manifest: Manifest, budget: Budget) -> Callable[[], None]:
    def once() -> None:
        bench.forget(0)
        bench.stage(manifest, 0, how=Manner(Pace(THREADS, idle=True, budget=budget)))

    return once


def scrubbed(bench: Bench, manifest: Manifest, budget: Budget) -> Callable[[], None]:
    found = bench.stage(manifest, 0)
    places = {place.name: place for place in found.layout.placements}
    order = Order({name: place.size_bytes for name, place in places.items()}, bytes(32))
    pool = idle_thread()

    def read() -> None:
        for run in order:
            budget.spend(order.run_bytes(run))
            for span in run:
                size, begin = order.span_bytes(span), places[span.tensor].offset + span.first * BLOCK_BYTES
                sums = bench.device.block_checks(0, begin, size)
                assert not wrong_blocks(found.vectors[span.tensor].blocks[span.first : span.first + span.blocks], sums)

    return lambda: pool.submit(read).result()


WORKS = {"stage": staged, "scrub": scrubbed}


def main(size_mib: int, what: str) -> None:
    vector.backend()
    budget = Budget(DEFAULT_SHARE * memory_speed())
    goes, over = threading.Event(), threading.Event()
    count = 0
    with places() as (directory, arena_dir):
        bench, manifest = filled(directory, arena_dir, size_mib, TENSORS)
        once = WORKS[what](bench, manifest, budget)

        def work() -> None:
            nonlocal count
            while not over.is_set():
                if goes.wait(0.05):
                    once()
                    count += 1

        thread = threading.Thread(target=work)
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
    main(int(sys.argv[1]), sys.argv[2])
