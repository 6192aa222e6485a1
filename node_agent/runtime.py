"""What every process of an agent is given at its start: settings, identity, sockets, a stop signal, a log.

A child ends when its parent does, whatever happens: the kernel is told at the start (PR_SET_PDEATHSIG), and a parent that was gone before
that is noticed by its pid. SIGTERM sets `stopping`; what that means is the role's own business. Log lines are JSON on standard error.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from node_agent import names
from node_agent.config import AgentConfig
from node_agent.metrics import Meter
from node_agent.tally import Tally
from raftmeta import stderr

_PR_SET_PDEATHSIG = 1

log: Any = structlog.get_logger()


@dataclass
class Runtime:
    config: AgentConfig
    boot_id: str  # of this start of the agent; the same for all its processes, however often one restarts
    port: int  # on which the serving API listens
    index: int = 0  # among the processes of this role
    tallies: Mapping[tuple[str, str], Tally] = field(default_factory=dict)  # by role and index: of this process; in the front of all
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def run_dir(self) -> Path:
        return self.config.sockets_dir

    @property
    def url(self) -> str:
        return self.config.public_url(self.port)

    def worker_socket(self, index: int) -> Path:
        return names.worker_socket(self.run_dir, index)

    def prober_socket(self) -> Path:
        return names.prober_socket(self.run_dir)

    def control_socket(self) -> Path:
        return names.control_socket(self.run_dir)

    def front_socket(self) -> Path:
        return names.front_socket(self.run_dir)

    def meter(self, role: str) -> Meter:
        """Counts go on where the process before this one stopped."""
        return Meter(self.tallies.get((role, str(self.index))))

    def listen_for_stop(self) -> None:
        """SIGTERM from here on sets `stopping`; SIGINT is the supervisor's business."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stopping.set)
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def end_with_parent(parent_pid: int) -> None:
    """From now on the kernel kills this process when its parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent_pid:
        sys.exit(1)


def start_log(role: str, config: AgentConfig) -> None:
    """Log lines as JSON on standard error, which from now on keeps nobody waiting: requests go on when nobody reads the log."""
    stderr.install()
    level = getattr(logging, config.log_level.upper())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(node=config.node, role=role, pid=os.getpid())
