"""Checking again and again: what a stop in the middle of a round leaves, and with which status it ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from consistency import watching
from consistency.outcome import Fault, Outcome
from raftmeta.core.errors import RaftmetaError
from tests.support.fake_fleet import FakeFleet
from tests.unit.consistency.test_recording import verdict_of

AWAY = Outcome((), fault=Fault("no_quorum", "because", ""))


def watched(rounds: list[Outcome], wait: Callable[[asyncio.Event], Awaitable[None]]) -> tuple[int, list[Outcome], list[str]]:
    """Exit status, what was told, and how rounds ended; `wait` is the round after the last."""
    told: list[Outcome] = []
    ended: list[str] = []
    left = iter(rounds)

    async def work() -> int:
        stop = asyncio.Event()

        async def check() -> Outcome:
            made = next(left, None)
            if made is not None:
                return made
            try:
                await wait(stop)
                await asyncio.Event().wait()
            finally:
                ended.append("cancelled")
            raise AssertionError("unreachable")

        return await asyncio.wait_for(watching.watch(check, 0.0, told.append, stop, min_pause_s=0.0), 30)

    return asyncio.run(work()), told, ended


async def stop_now(stop: asyncio.Event) -> None:
    stop.set()


def test_a_stop_in_the_middle_of_a_round_cancels_it_and_ends_with_the_status_of_the_one_before() -> None:
    good = Outcome((verdict_of(FakeFleet()),))
    assert watched([AWAY, good], stop_now) == (0, [AWAY, good], ["cancelled"])
    assert watched([good, AWAY], stop_now) == (2, [good, AWAY], ["cancelled"])


def test_without_any_verdict_it_ends_as_incomplete() -> None:
    assert watched([], stop_now) == (2, [], ["cancelled"])


def test_a_wrong_command_line_ends_it() -> None:
    async def fail(stop: asyncio.Event) -> None:
        raise RaftmetaError("unknown_deployment", "because")

    with pytest.raises(RaftmetaError, match="unknown_deployment"):
        watched([AWAY], fail)


def test_a_stop_between_two_rounds_ends_the_pause() -> None:
    async def work() -> int:
        stop = asyncio.Event()

        async def check() -> Outcome:
            asyncio.get_running_loop().call_later(0.01, stop.set)
            return AWAY

        return await asyncio.wait_for(watching.watch(check, 3_600.0, lambda _: None, stop), 30)

    assert asyncio.run(work()) == 2


@pytest.mark.parametrize("number", watching.SIGNALS)
def test_signals_of_a_terminal_and_of_a_service_manager_stop_it(number: signal.Signals) -> None:
    async def work() -> None:
        with watching.stopped_by_signals() as stop:
            os.kill(os.getpid(), number)
            await asyncio.wait_for(stop.wait(), 10)

    asyncio.run(work())
