"""Control's view of the workers: ask all of one deployment to load, forget or acknowledge, and know what they said.

A worker that is away is waited for, within a bound: the supervisor starts it again. Nothing counts as done before every worker said so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from node_agent import failure
from node_agent.ipc import CallFailed, ConnectionLost
from node_agent.messages import (
    NOT_LOADED,
    Acknowledge,
    Answering,
    Cancel,
    CheckDerived,
    DerivedChecked,
    Fault,
    Load,
    Loaded,
    Numbered,
    Prove,
    Proved,
    Release,
    Reply,
)
from node_agent.peers import Peer
from node_agent.plan import Target
from node_agent.refusal import Refusal

POLL_S = 0.02
RELEASE_S = 30.0
DERIVED_S = 60.0  # for one worker to digest what it holds outside the slot, between its requests
CANCEL_S = 5.0  # a worker answers for this beside what it computes


class WorkersLag(Exception):
    """Not every worker did what was asked within the time; another try may succeed."""


class Crew:
    def __init__(self, peers: Sequence[Peer], prober: Peer, load_timeout_s: float) -> None:
        self._peers = peers
        self._prober = prober
        self._load_timeout_s = load_timeout_s

    def loaded(self, deployment: str, slot: int, target: Target) -> bool:
        """Every worker is here and holds this version in this slot."""
        return all(peer.connected and (slot, target.label, target.checksum) in _held(peer, deployment) for peer in self._peers)

    async def prove(self, deployment: str, slot: int, target: Target) -> Proved:
        """Try it where no request is. Raises CallFailed with what is wrong, WorkersLag when no prober answers in time."""
        deadline = time.monotonic() + self._load_timeout_s
        while not self._prober.connected:
            if time.monotonic() >= deadline:
                raise WorkersLag(f"no prober was there within {self._load_timeout_s:g} s")
            await asyncio.sleep(POLL_S)
        made = lambda number: Prove(number, deployment, slot, target.label, target.checksum)  # noqa: E731
        result = await _call(self._prober, made, max(0.001, deadline - time.monotonic()))
        if isinstance(result, ConnectionLost):
            why = failure.make("warmup_failed", "warm", f"{deployment} {target.label}", "an answer", "the prober ended before it gave one")
            raise CallFailed(Fault(0, 409, why.kind, why.detail, why))
        if isinstance(result, CallFailed):
            raise result
        if not isinstance(result, Proved):
            raise WorkersLag(f"the prober did not answer within {self._load_timeout_s:g} s")
        return result

    async def load(self, deployment: str, slot: int, target: Target) -> dict[str, str]:
        """Bind and warm in every worker, one after the other, so that most of them compute requests at any moment.

        Gives SHA-256 of each tensor that their modules hold outside the slot. Raises CallFailed with the first refusal, WorkersLag past the
        time, Refusal derived_changed when two workers made different modules of the same bytes.
        """
        derived: dict[str, str] | None = None
        for peer in self._peers:
            deadline = time.monotonic() + self._load_timeout_s
            result = await self._until(peer, lambda n: Load(n, deployment, slot, target.label, target.checksum), deadline)
            if isinstance(result, CallFailed):
                raise result
            if not isinstance(result, Loaded):
                raise WorkersLag(f"a worker did not answer within {self._load_timeout_s:g} s")
            if derived is not None and derived != result.derived:
                names = sorted(name for name in derived.keys() | result.derived.keys() if derived.get(name) != result.derived.get(name))
                raise Refusal(
                    "derived_changed", f"derived tensors of {target.label}", "the same in every worker", ", ".join(names[:10]), "bind"
                )
            derived = result.derived
        return derived or {}

    async def release(self, deployment: str, slot: int, limit_s: float = RELEASE_S) -> None:
        """No request touches the slot outside the gate any more. A worker that is away loads anew and sees the slot's record.

        Raises WorkersLag where one did not do it.
        """
        peers = [peer for peer in self._peers if peer.connected]
        results = await asyncio.gather(*(_call(peer, lambda n: Release(n, deployment, slot), limit_s) for peer in peers))
        for result in results:
            if isinstance(result, TimeoutError):
                raise WorkersLag(f"a worker did not release slot {slot} of {deployment} within {limit_s:g} s")
            if isinstance(result, CallFailed):
                raise WorkersLag(f"a worker did not release slot {slot} of {deployment}: {result.fault.detail}")

    async def cancel(self, deployment: str, slot: int, worker: int) -> bool:
        """End what this worker computes in the slot. False when it does not even answer."""
        if worker >= len(self._peers):
            return False  # of an earlier start with more workers
        result = await _call(self._peers[worker], lambda n: Cancel(n, deployment, slot), CANCEL_S)
        if isinstance(result, CallFailed):
            raise result
        return not isinstance(result, TimeoutError)  # one that was lost ended, which is what was asked for

    def failed(self, deployment: str) -> int:
        """Requests that modules of this deployment failed at, as far as the workers of now say."""
        return sum(item.failed for peer in self._peers for item in peer.served if item.deployment == deployment)

    async def check_derived(self, deployment: str, slot: int, checksum: str, ends: bool) -> list[tuple[int, DerivedChecked]]:
        """What the workers that answer found in their own memory, by worker. `ends`: one that found damage ends."""
        found: list[tuple[int, DerivedChecked]] = []
        for worker, peer in enumerate(self._peers):
            reply = await _call(peer, lambda n: CheckDerived(n, deployment, slot, checksum, ends), DERIVED_S)
            if isinstance(reply, DerivedChecked):
                found.append((worker, reply))
        return found

    async def acknowledged(self, deployment: str, target: Target, timeout_s: float) -> None:
        """Return once every worker answers with the target. Raises WorkersLag with what the others say."""
        deadline = time.monotonic() + timeout_s
        while True:
            replies = await asyncio.gather(*(_call(peer, lambda n: Acknowledge(n, deployment), timeout_s) for peer in self._peers))
            wrong = [_said(reply) for reply in replies if not _answers(reply, target)]
            if not wrong:
                return
            if time.monotonic() >= deadline:
                raise WorkersLag(f"{len(wrong)} of {len(self._peers)} workers do not answer with {target.label}: {wrong[0]}")
            await asyncio.sleep(POLL_S)

    async def _until(self, peer: Peer, make: Callable[[int], Numbered], deadline: float) -> Reply | Exception:
        """One worker's reply, over as many of its lives as fit before the deadline."""
        while True:
            result = await _call(peer, make, max(0.001, deadline - time.monotonic()))
            lost = isinstance(result, ConnectionLost) or (isinstance(result, CallFailed) and result.fault.code == NOT_LOADED)
            if not lost or time.monotonic() >= deadline:
                return result
            await asyncio.sleep(POLL_S)


async def _call(peer: Peer, make: Callable[[int], Numbered], timeout_s: float) -> Reply | Exception:
    try:
        return await peer.call(make, timeout_s)
    except (ConnectionLost, CallFailed, TimeoutError) as fault:
        return fault


def _held(peer: Peer, deployment: str) -> set[tuple[int, str, str]]:
    return {(slot.slot, slot.label, slot.checksum) for item in peer.served if item.deployment == deployment for slot in item.slots}


def _answers(reply: Reply | Exception, target: Target) -> bool:
    return isinstance(reply, Answering) and (reply.label, reply.checksum) == (target.label, target.checksum)


def _said(reply: Reply | Exception) -> str:
    return f"it answers with {reply.label}" if isinstance(reply, Answering) else str(reply) or type(reply).__name__
