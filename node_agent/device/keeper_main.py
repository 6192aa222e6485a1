"""The keeper's process: `python -m node_agent.device.keeper_main --socket PATH --limit-bytes N [--device cuda:N] [--parent PID]`.

With a parent it ends when that does, however it ends; without one it keeps memory over restarts of the agent, as arenas do, until SIGTERM.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog

from node_agent.device.cuda_memory import CudaMaker
from node_agent.device.driver import Driver
from node_agent.device.keeper import Holdings, Keeper
from node_agent.device.memory_maker import MemfdMaker
from node_agent.refusal import Refusal
from node_agent.runtime import end_with_parent

EXIT_REFUSED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="node_agent.device.keeper_main", description="Holds memory for the processes of an agent.")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--limit-bytes", type=int, required=True)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda:N")
    parser.add_argument("--parent", type=int, default=0)
    given = parser.parse_args(arguments)
    if given.parent:
        end_with_parent(given.parent)
    structlog.configure(processors=[structlog.processors.JSONRenderer()], logger_factory=structlog.WriteLoggerFactory(sys.stderr))
    stopping = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the agent's business
    try:
        maker = MemfdMaker() if given.device == "cpu" else CudaMaker(Driver(given.device))
        keeper = Keeper(given.socket, Holdings(maker, given.limit_bytes))
    except Refusal as refusal:
        sys.stderr.write(f"keeper: {refusal}\n")
        return EXIT_REFUSED
    try:
        keeper.run(lambda: stopping)
    finally:
        keeper.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
