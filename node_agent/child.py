"""One process of an agent, as its supervisor starts it: `python -m node_agent.child --role front …`. The wiring of each role.

Nobody types its words, so they have none of the command line's help.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from node_agent import config as configuration
from node_agent.runtime import Runtime, end_with_parent, start_log
from node_agent.tally import Tally
from raftmeta.core.errors import RaftmetaError
from raftmeta.stderr import QueuedStderr

# A forward pass gives the interpreter up and takes it back at each of some hundred operations. While another thread binds the next version,
# each taking back costs up to this long; with the default of 5 ms requests took 20 times as long (p99 1,400 ms instead of 330 ms).
SWITCH_INTERVAL_S = 0.0001
EXIT_CONFIG = 3  # as the command line's: a configuration file is wrong
ROLES = ("front", "worker", "prober", "control")
PROBER_NICE = 10  # a tenth of a worker's share where both want the same processor


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="node_agent.child", description="A process of `raftmeta agent`, which starts it.")
    parser.add_argument("--role", choices=ROLES, required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--boot-id", required=True)
    for name in ("index", "parent", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--listen-fd", type=int, default=-1)
    parser.add_argument("--tally", type=_tally_argument, action="append", default=[], metavar="ROLE-INDEX=FD")
    given = parser.parse_args(arguments)
    end_with_parent(given.parent)
    try:
        config = configuration.load(given.config)
        start_log(given.role, config)
        runtime = Runtime(config, given.boot_id, given.port, given.index, {process: Tally(fd) for process, fd in given.tally})
        _run(given.role, runtime, given.listen_fd)
    except RaftmetaError as error:
        sys.stderr.write(f"raftmeta agent, {given.role}: {error}\n")
        return EXIT_CONFIG
    return 0


def _tally_argument(text: str) -> tuple[tuple[str, str], int]:
    name, _, fd = text.partition("=")
    role, _, index = name.partition("-")
    return (role, index), int(fd)


def _run(role: str, runtime: Runtime, listen_fd: int) -> None:
    match role:
        case "front":
            _run_front(runtime, listen_fd)
        case "worker":
            asyncio.run(_worker(runtime))
        case "prober":
            asyncio.run(_prober(runtime))
        case _:
            asyncio.run(_control(runtime))


def _run_front(runtime: Runtime, listen_fd: int) -> None:
    import uvloop

    uvloop.run(_front(runtime, listen_fd))


async def _front(runtime: Runtime, listen_fd: int) -> None:
    from node_agent import http_server

    runtime.listen_for_stop()
    await http_server.run(runtime, socket.socket(fileno=listen_fd))


async def _worker(runtime: Runtime) -> None:
    import torch

    from node_agent.engine import known
    from node_agent.host import Host
    from node_agent.loading import Loader
    from node_agent.store import Store
    from node_agent.worker import Worker

    runtime.listen_for_stop()
    config = runtime.config
    torch.set_num_threads(config.threads)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    loader = Loader(Store(config.store_dir, config.store_quota_bytes), known.load(config.engines))
    host = Host(runtime.index, (config.store_dir, config.arena_dir), loader)
    await Worker(runtime.index, host, runtime.meter("worker")).run(runtime)


async def _prober(runtime: Runtime) -> None:
    from node_agent.proving import run

    os.nice(PROBER_NICE)
    runtime.listen_for_stop()
    await run(runtime)


async def _control(runtime: Runtime) -> None:
    from node_agent.control import run

    runtime.listen_for_stop()
    await run(runtime)


def leave(status: int) -> NoReturn:
    """End at once. What had to be closed is closed; to take torch and its modules apart again costs seconds of a processor."""
    if isinstance(sys.stderr, QueuedStderr):
        sys.stderr.finish()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
