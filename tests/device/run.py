"""`python -m tests.device.run [--device cuda:0] [--mib 1024]`: builds, checks and measures on a machine with a GPU, in under eight minutes.

Where there is no device it rehearses with memory of the host what can be rehearsed, and says of everything else that it was skipped, and
why. Exit status 0: everything was looked at and held; 1: something failed; 2: something was skipped.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Sequence

from node_agent.device.driver import Driver
from node_agent.refusal import Refusal
from tests.device import checks, measures, steps
from tests.device.places import WIDE
from tests.device.steps import Skipped, Step

LIMIT_S = 340.0  # no step begins later; the longest one has 120 s
HARD_LIMIT_S = 475.0  # a step that hangs ends the process: a device that hangs cannot be waited for
CONTRACT = ("tests/contract/test_device_port.py", "tests/contract/test_device_port_faults.py")
DRIVEN = ("tests/unit/node_agent/test_cuda_memory.py", "tests/unit/node_agent/test_torch_feed.py", "tests/unit/node_agent/test_graphs.py")


def plan(device: str, missing: str, mib: int) -> list[Step]:
    """`missing`: why there is no device, "" if there is one."""
    tensors = max(4, (mib << 20) // WIDE)
    rehearsed = "cpu" if missing else device

    def on_device(work: Callable[[], str]) -> Callable[[], str]:
        def guarded() -> str:
            if missing:
                raise Skipped(missing)
            return work()

        return guarded

    host = " (rehearsed on the host)" if missing else ""
    return [
        Step("machine", on_device(lambda: checks.machine(device))),
        Step("vector: backends equal on the host", lambda: checks.vectors("cpu")),
        Step("vector: backends equal on the device", on_device(lambda: checks.vectors(device))),
        Step("contract of the device port: host and fake", lambda: checks.suite(CONTRACT, 120, "-k", "not cuda")),
        Step("contract of the device port: device", on_device(lambda: checks.suite(CONTRACT[:1], 120, "-k", "cuda"))),
        Step("driver, feeds and graphs over fakes", lambda: checks.suite(DRIVEN, 60)),
        Step("keeper: kills, host memory", lambda: checks.suite(("tests/device/test_keeper_killed.py",), 120)),
        Step("keeper: bytes that nobody maps", checks.memory_of_the_host_outlives_a_kill),
        Step("keeper: kills, device memory", on_device(lambda: checks.memory_outlives_a_kill(device))),
        Step(f"staging and answers from both slots{host}", lambda: checks.staging_and_switch(rehearsed, min(tensors, 32))),
        Step("graphs: replay equals eager", lambda: checks.graphs(rehearsed, 8)),
        Step(f"measure: staging{host}", lambda: measures.staging(rehearsed, tensors)),
        Step(f"measure: vector{host}", lambda: measures.vector(rehearsed, tensors * WIDE)),
        Step(f"measure: switch{host}", lambda: measures.switch(rehearsed, 4)),
    ]


def why_no_device(device: str) -> str:
    """ "" when the driver and torch both know it."""
    import torch

    try:
        Driver(device)
    except Refusal as refusal:
        return str(refusal)
    return "" if torch.cuda.is_available() else "the driver knows a device, and this build of torch does not"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.device.run")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--mib", type=int, default=0, help="size of a version; 0: 1024 on a device, 16 in a rehearsal")
    given = parser.parse_args(arguments)
    watchdog = threading.Timer(HARD_LIMIT_S, _give_up)
    watchdog.daemon = True
    watchdog.start()
    missing = why_no_device(given.device)
    if missing:
        print(f"NO DEVICE, most of this run is skipped or rehearsed: {missing}", flush=True)
    results = steps.run(
        plan(given.device, missing, given.mib or (16 if missing else 1024)), LIMIT_S, say=lambda line: print(line, flush=True)
    )
    watchdog.cancel()
    print(f"\n{steps.table(results)}")
    return steps.status(results)


def _give_up() -> None:
    print(f"FAILED: a step hangs, {HARD_LIMIT_S:g} s are over", flush=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
