"""The wiring of an agent: `raftmeta agent --config FILE` is the supervisor; it starts this module again with a role for each child."""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from node_agent import config as configuration
from node_agent.config import AgentConfig
from node_agent.runtime import Runtime, end_with_parent, start_log
from raftmeta.core.errors import RaftmetaError

EXAMPLE = "Example: raftmeta agent --config ./cluster/agents/node-a/agent.toml"
# A forward pass gives the interpreter up and takes it back at each of some hundred operations. While another thread binds the next version,
# each taking back costs up to this long; with the default of 5 ms requests took 20 times as long (p99 1,400 ms instead of 330 ms).
SWITCH_INTERVAL_S = 0.0001
EXIT_CONFIG = 3  # as the command line's: a configuration file is wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="raftmeta agent", description="Run the agent of one serving node.", epilog=EXAMPLE)
    parser.add_argument("--config", type=Path, required=True, help="TOML file; every field can be overridden by RAFTMETA_AGENT_<FIELD>")
    for name in ("role", "index", "boot-id", "parent", "port", "listen-fd"):  # said by the supervisor to its children
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.parent is not None:
        end_with_parent(int(given.parent))
    try:
        config = configuration.load(given.config)
        start_log(given.role or "supervisor", config)
        if given.role is None:
            return _supervise(config, given.config)
        runtime = Runtime(config, given.boot_id, int(given.port))
        match given.role:
            case "front":
                _run_front(runtime, int(given.listen_fd))
            case "worker":
                asyncio.run(_worker(runtime, int(given.index)))
            case "control":
                asyncio.run(_control(runtime))
            case _:
                parser.error(f"no role {given.role!r}")
    except RaftmetaError as error:
        sys.stderr.write(f"raftmeta agent: {error}\n")
        return EXIT_CONFIG
    return 0


def _supervise(config: AgentConfig, path: Path) -> int:
    from node_agent.supervisor import Supervisor

    return Supervisor(config, path.absolute()).run()


def _run_front(runtime: Runtime, listen_fd: int) -> None:
    import uvloop

    uvloop.run(_front(runtime, listen_fd))


async def _front(runtime: Runtime, listen_fd: int) -> None:
    from node_agent import http_server

    runtime.listen_for_stop()
    await http_server.run(runtime, socket.socket(fileno=listen_fd))


async def _worker(runtime: Runtime, index: int) -> None:
    import torch

    from node_agent.engine.hf import HfEngine
    from node_agent.host import Host
    from node_agent.store import Store
    from node_agent.worker import Worker

    runtime.listen_for_stop()
    config = runtime.config
    torch.set_num_threads(config.threads)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    store = Store(config.store_dir, config.store_quota_bytes)
    host = Host(index, (config.store_dir, config.arena_dir), store, {"hf": HfEngine})
    await Worker(index, host).run(runtime)


async def _control(runtime: Runtime) -> None:
    from node_agent.control import run

    runtime.listen_for_stop()
    await run(runtime)


if __name__ == "__main__":
    sys.exit(main())
