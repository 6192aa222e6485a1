"""What the commands about one node share: its configuration, and a question to its control process over its own socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from node_agent import config as configuration
from node_agent import names
from node_agent.config import AgentConfig
from node_agent.ipc import CallFailed, ConnectionLost, Link
from node_agent.messages import Numbered, Reply
from raftmeta.cli.exits import UsageFault
from raftmeta.cli.program import JsonOptions
from raftmeta.core.errors import CODES, RaftmetaError

CONTROL_S = 5.0


@dataclass(frozen=True, kw_only=True)
class NodeOptions(JsonOptions):
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="The agent.toml that the agent runs with.")]

    def load(self) -> AgentConfig:
        try:
            return configuration.load(self.config)
        except RaftmetaError as fault:
            raise UsageFault(fault.detail, "correct the file or the RAFTMETA_AGENT_* variable that it names") from fault


def ask_control(config: AgentConfig, make: Callable[[int], Numbered]) -> Reply:
    """Control's answer. Raises RaftmetaError agent_unreachable when no agent runs here, or with what it refuses."""

    async def work() -> Reply:
        link = Link(lambda push: None, lambda: None)
        try:
            await link.connect(names.control_socket(config.sockets_dir))
            return await link.call(make, CONTROL_S)
        except CallFailed as refused:
            code = refused.fault.code if refused.fault.code in CODES else "internal"
            raise RaftmetaError(code, refused.fault.detail) from refused
        except (OSError, ConnectionLost, TimeoutError) as cause:
            detail = f"no agent answers at {names.control_socket(config.sockets_dir)}: {cause or type(cause).__name__}"
            raise RaftmetaError("agent_unreachable", detail) from cause
        finally:
            await link.close()

    return asyncio.run(work())
