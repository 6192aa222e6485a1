"""The leader's loop over rollouts: look at the state, let the pure core decide, propose what it says.

Only the member that leads proposes; two that both believe to lead do no harm, since every command names the phase it saw. Time is the
cluster's: what was stamped when this member began to lead plus its own monotonic clock, so a jump of the wall clock ends no rollout.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError

import structlog

from raftmeta.core.commands import Body
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.rollout import decide, sides
from raftmeta.core.state import State
from raftmeta.core.types import RolloutStatus
from raftmeta.log.port import Log
from raftmeta.nodes import NodeTable

PRINCIPAL = "system:controller"
LOOK_S = 1.0  # without news; deadlines of phases are no finer than this
PROPOSE_S = 5.0
PAUSE_S = 0.2  # after a proposal that failed

_log = structlog.get_logger()


class Controller:
    def __init__(self, log: Log, state: Callable[[], State], nodes: NodeTable) -> None:
        self._log, self._state, self._nodes = log, state, nodes
        self._news = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="raftmeta-controller", daemon=True)
        self._term = -1
        self._led_from = (0, 0)  # cluster ms, monotonic ms

    def start(self) -> None:
        self._thread.start()

    def notify(self) -> None:
        """Something about rollouts changed. From any thread."""
        self._news.set()

    def stop(self) -> None:
        self._stopping = True
        self._news.set()
        if self._thread.is_alive():
            self._thread.join(PROPOSE_S + LOOK_S)

    def _run(self) -> None:
        while not self._stopping:
            self._news.wait(LOOK_S)
            self._news.clear()
            status = self._log.status()
            if self._stopping or status.role != "leader":
                self._term = -1
                continue
            if status.term != self._term:
                self._term = status.term
                self._led_from = (self._state().cluster_ms, _monotonic_ms())
            self._look()

    def _look(self) -> None:
        state = self._state()
        cluster_ms, since_ms = self._led_from
        now_ms = max(state.cluster_ms, cluster_ms + _monotonic_ms() - since_ms)
        missing = self._nodes.missing(_expected(state), since_ms)
        for body in decide(state, now_ms, missing):
            if self._stopping:
                return
            self._propose(body)

    def _propose(self, body: Body) -> None:
        ticket = self._log.propose(body, f"controller-{uuid.uuid4().hex}", PRINCIPAL, PROPOSE_S)
        try:
            outcome = ticket.result(PROPOSE_S + 1.0)
        except (RaftmetaError, FutureTimeoutError) as fault:
            _log.warning("controller_proposal_failed", command=type(body).__name__, reason=str(fault))
            time.sleep(PAUSE_S)
            self._news.set()
        else:
            _log.info(
                "controller_proposed", command=type(body).__name__, revision=outcome.revision, code=outcome.code, detail=outcome.detail
            )


def _expected(state: State) -> set[str]:
    """Nodes that a running rollout waits for."""
    return {
        node
        for deployment in state.deployments.values()
        if deployment.rollout_id and state.rollouts[deployment.rollout_id].status is RolloutStatus.RUNNING
        for node in sides(deployment)
    }


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000
