"""Logs of commands as builds of feature level 1 write them, made of a seed alone: the same bytes in every build and process.

What a state is after such a log is a promise: members of two builds apply the same entries, and a journal outlives an update.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from raftmeta.core import commands as c
from raftmeta.core.apply import apply_batch
from raftmeta.core.rollout import ROWS, decide, sides, waiting_for
from raftmeta.core.state import State
from raftmeta.core.types import DrainOverdue, Policy, Rollout, RolloutStatus, Stage
from tests.support.commands import NOW_MS, attestation, command_bytes, declaration, publication

STEPS = 120

T = TypeVar("T")


def log_of(seed: int, steps: int = STEPS) -> list[bytes]:
    """Encoded commands, from an empty state on. Most are accepted; some are refused, repeated or no commands at all."""
    return _Writer(seed).write(steps)


class _Writer:
    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed).random  # the one method whose sequence is promised
        self._state = State.empty()
        self._payloads: list[bytes] = []
        self._now_ms = NOW_MS
        self._moves: tuple[Callable[[], c.Body], ...] = (
            self._push, self._push, self._push, self._push, self._push, self._push,
            self._activate, self._activate, self._roll_back, self._publish, self._publish_batch,
            self._declare, self._declare, self._delete, self._abort, self._fail, self._verdict, self._raise,
        )  # fmt: skip

    def write(self, steps: int) -> list[bytes]:
        for body in (publication("m", "1"), publication("m", "2"), declaration()):
            self._append(body)
        for _ in range(steps):
            chance = self._draw()
            if chance < 0.03:
                self._apply(bytes([193, round(chance * 1_000)]))
            elif chance < 0.06:
                self._apply(self._pick(self._payloads))
            else:
                self._append(self._pick(self._moves)())
        return self._payloads

    def _append(self, body: c.Body) -> None:
        self._now_ms += round(self._draw() * 5_000)
        self._apply(command_bytes(body, f"{self._now_ms}-{len(self._payloads)}", self._now_ms))

    def _apply(self, payload: bytes) -> None:
        self._payloads.append(payload)
        self._state = apply_batch(self._state, [payload]).state

    def _pick(self, choices: Sequence[T]) -> T:
        return choices[int(self._draw() * len(choices))]

    @property
    def _running(self) -> Rollout | None:
        found = [rollout for rollout in self._state.rollouts.values() if rollout.status is RolloutStatus.RUNNING]
        return min(found, key=lambda each: each.id) if found else None

    def _push(self) -> c.Body:
        rollout = self._running
        if rollout is None:
            return self._activate()
        due = decide(self._state, self._state.cluster_ms, ())
        if due:
            return due[0]
        deployment = self._state.deployments[rollout.deployment]
        node, gate = waiting_for(rollout, deployment)[0], ROWS[rollout.phase].gate
        assert gate is not None
        return attestation(rollout, node, sides(deployment)[node], gate)

    def _fail(self) -> c.Body:
        rollout = self._running
        if rollout is None:
            return self._roll_back()
        node, side = self._pick(list(sides(self._state.deployments[rollout.deployment]).items()))
        return attestation(rollout, node, side, Stage.FAILED)

    def _label(self) -> str:
        return self._pick(("1", "2", "3", "4"))

    def _activate(self) -> c.Body:
        return c.Activate(self._pick(("d", "d", "e")), self._label(), None, f"r{len(self._payloads)}")

    def _roll_back(self) -> c.Body:
        return c.RollBack("d", self._pick((None, "1")), f"r{len(self._payloads)}")

    def _publish(self) -> c.Body:
        return publication(self._pick(("m", "m", "n")), self._label(), self._pick(("", "", "other")))

    def _publish_batch(self) -> c.Body:
        return c.PublishBatch((publication("m", self._label()), publication("n", self._label())))

    def _declare(self) -> c.Body:
        made = declaration(self._pick(("d", "d", "e")), "m", self._pick((("a1", "a2"), ("a1",))), self._pick((("b1",), ())))
        policy = self._pick((Policy(), Policy(5_000, 6_000), Policy(drain_timeout_ms=9_000), Policy(drain_overdue=DrainOverdue.CANCEL)))
        return msgspec.structs.replace(made, policy=policy)

    def _delete(self) -> c.Body:
        return c.DeleteVersion("m", self._label())

    def _abort(self) -> c.Body:
        rollout = self._running
        return c.AbortRollout("none" if rollout is None else rollout.id, "operator", "", "")

    def _verdict(self) -> c.Body:
        return c.RecordVerdict("d", self._pick(("consistent", "diverged", "incomplete", "fine")), b'{"findings": []}')

    def _raise(self) -> c.Body:
        return c.RaiseFeatureLevel(self._pick((0, 1)))
