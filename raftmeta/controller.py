"""The leader's loop over rollouts: look at the state, let the pure core decide, propose what it says.

Only the member that leads proposes; two that both believe to lead do no harm, since every command names the phase it saw. How long a
phase takes is counted on this member's monotonic clock from when it first saw it as the leader, so no jump of any wall clock ends a
rollout; a new leader counts anew.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError

import structlog

from raftmeta.core.commands import Body
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.rollout import decide, sides
from raftmeta.core.state import State
from raftmeta.core.types import Deployment, Phase, Rollout, RolloutStatus
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
        self._led_since_ms = 0
        self._seen: dict[str, tuple[Phase, int]] = {}  # running rollout -> phase and when it was first seen in it

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
                self._led_since_ms = _monotonic_ms()
                self._seen = {}
            self._look()

    def _look(self) -> None:
        state = self._state()
        now_ms = _monotonic_ms()
        self._seen = seen_since(self._seen, state, now_ms)
        missing = self._nodes.missing(_expected(state), self._led_since_ms)
        for body in decide(state, now_ms, missing, {rollout: since for rollout, (_, since) in self._seen.items()}):
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


def seen_since(seen: Mapping[str, tuple[Phase, int]], state: State, now_ms: int) -> dict[str, tuple[Phase, int]]:
    """Every running rollout with its phase and the monotonic time at which it was first seen in that phase."""
    found = {}
    for _, rollout in _running(state):
        known = seen.get(rollout.id)
        found[rollout.id] = known if known is not None and known[0] is rollout.phase else (rollout.phase, now_ms)
    return found


def _expected(state: State) -> set[str]:
    """Nodes that a running rollout waits for."""
    return {node for deployment, _ in _running(state) for node in sides(deployment)}


def _running(state: State) -> Iterator[tuple[Deployment, Rollout]]:
    for deployment in state.deployments.values():
        rollout = state.rollouts.get(deployment.rollout_id)
        if rollout is not None and rollout.status is RolloutStatus.RUNNING:
            yield deployment, rollout


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000
