"""The watch hub: whatever is published, dropped and read in whatever order, a watcher sees all or is told that it cannot."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raftmeta.core.errors import RaftmetaError
from raftmeta.core.events import Event
from raftmeta.core.types import ModelRecord
from raftmeta.watch import Subscription, WatchHub, WatchLimits


def event(revision: int, kind: str = "model", key: str = "m") -> Event:
    return Event(revision, kind, key, "put", ModelRecord(key, 1, 1, revision, 0))


def drain(subscription: Subscription) -> list[int]:
    """Revisions of everything that is there now, one for each wanted event."""
    found: list[int] = []
    while True:
        before = subscription.position
        found += [change.revision for change, places in subscription.take() for _ in places]
        if subscription.position == before:
            return found


def code_of(call: Any, *values: Any) -> str:
    with pytest.raises(RaftmetaError) as caught:
        call(*values)
    return caught.value.code


def test_a_watch_gets_what_lies_above_its_revision_in_order() -> None:
    hub = WatchHub(0)
    hub.publish([event(1), event(2), event(2, "version"), event(4)], 5)
    with hub.subscribe(1) as watch:
        assert drain(watch) == [2, 2, 4]
        assert watch.position == 5
        hub.publish([event(6)], 6)
        assert drain(watch) == [6]


def test_all_events_of_a_revision_are_one_change() -> None:
    hub = WatchHub(0)
    hub.publish([event(3), event(3, "version"), event(4)], 4)
    with hub.subscribe(0) as watch:
        assert [(change.revision, len(change.events), places) for change, places in watch.take()] == [(3, 2, (0, 1)), (4, 1, (0,))]


@pytest.mark.parametrize(("opened_from", "sees"), [(6, None), (7, [8, 9]), (8, [9]), (9, [])])
def test_a_watch_opened_before_at_and_after_the_compacted_revision(opened_from: int, sees: list[int] | None) -> None:
    hub = WatchHub(5, WatchLimits(max_events=2))
    for revision in (6, 7, 8, 9):
        hub.publish([event(revision)], revision)
    assert hub.floor == 7
    if sees is None:
        assert code_of(hub.subscribe, opened_from) == "compacted"
        assert hub.watchers == 0
    else:
        with hub.subscribe(opened_from) as watch:
            assert drain(watch) == sees


@pytest.mark.parametrize("compacted_by", ["the bound of the ring", "a snapshot"])
@pytest.mark.parametrize("opened_from", [3, 4, 5, 6])
def test_a_delete_at_the_compaction_revision_reaches_every_watch_that_is_not_told_it_is_gone(opened_from: int, compacted_by: str) -> None:
    """The delete is revision 5; a watch from 4 still needs it, one from 5 has had it."""
    hub = WatchHub(3, WatchLimits(max_events=2))
    hub.publish([event(4)], 4)
    hub.publish([Event(5, "version", "m/1", "delete", None)], 5)
    with hub.subscribe(4) as early:
        assert drain(early) == [5]
    if compacted_by == "a snapshot":
        hub.compacted(6)
        needed_floor = 6
    else:
        hub.publish([event(6)], 6)  # pushes out revision 4
        assert hub.floor == 4
        with hub.subscribe(4) as watch:
            assert drain(watch) == [5, 6]
        hub.publish([event(7)], 7)  # and now the delete itself
        needed_floor = 5
    assert hub.floor == needed_floor
    if opened_from < needed_floor:
        assert code_of(hub.subscribe, opened_from) == "compacted"
    else:
        with hub.subscribe(opened_from) as watch:
            assert drain(watch) == [revision for revision in (6, 7) if opened_from < revision <= hub.revision]


def test_a_slow_watcher_is_told_that_it_was_compacted_and_never_skips() -> None:
    hub = WatchHub(0, WatchLimits(max_events=3))
    with hub.subscribe(0) as watch:
        for revision in range(1, 5):
            hub.publish([event(revision)], revision)
        assert code_of(watch.take) == "compacted"
        assert code_of(watch.take) == "compacted"


def test_bytes_bound_what_is_retained_as_well_as_counts() -> None:
    hub = WatchHub(0, WatchLimits(max_bytes=10_000))
    for revision in range(1, 101):
        hub.publish([event(revision)], revision)
    events, size = hub.retained
    assert (0 < events < 100, size <= 10_000, hub.floor) == (True, True, 100 - events)


def test_an_installed_snapshot_compacts_every_position_before_it() -> None:
    hub = WatchHub(0)
    hub.publish([event(1)], 1)
    with hub.subscribe(0) as old, hub.subscribe(9) as ahead:
        hub.compacted(9)
        assert code_of(old.take) == "compacted"
        assert drain(ahead) == []
        hub.publish([event(10)], 10)
        assert drain(ahead) == [10]
    assert code_of(hub.subscribe, 8) == "compacted"
    assert hub.retained[0] == 1


def test_a_snapshot_of_the_present_revision_takes_nothing_away() -> None:
    hub = WatchHub(0)
    hub.publish([event(1)], 2)
    hub.compacted(2)
    with hub.subscribe(0) as watch:
        assert drain(watch) == [1]


def test_a_filter_moves_the_position_past_what_it_leaves_out() -> None:
    hub = WatchHub(0, WatchLimits(take_changes=2))
    hub.publish([event(revision, "model" if revision % 5 else "rollout") for revision in range(1, 13)], 13)
    with hub.subscribe(0, lambda one: one.kind == "rollout") as watch:
        assert drain(watch) == [5, 10]
        assert watch.position == 13


def test_a_watch_from_a_revision_that_the_hub_has_not_reached_never_goes_back() -> None:
    hub = WatchHub(3)
    with hub.subscribe(6) as watch:
        hub.publish([event(4), event(5)], 5)
        assert (drain(watch), watch.position) == ([], 6)
        hub.publish([event(6), event(7)], 7)
        assert (drain(watch), watch.position) == ([7], 7)


def test_the_number_of_watchers_is_bounded_and_a_place_comes_back() -> None:
    hub = WatchHub(0, WatchLimits(max_watchers=2))
    first, second = hub.subscribe(0), hub.subscribe(0)
    assert code_of(hub.subscribe, 0) == "too_many_watchers"
    with first:
        pass
    with hub.subscribe(0):
        assert hub.watchers == 2
    with second:
        pass
    assert hub.watchers == 0


def test_revisions_that_go_backwards_are_a_defect_of_the_writer() -> None:
    hub = WatchHub(5)
    for call in (
        lambda: hub.publish([event(5)], 6),
        lambda: hub.publish([event(7)], 6),
        lambda: hub.publish([], 4),
        lambda: hub.compacted(4),
    ):
        with pytest.raises(AssertionError):
            call()


def test_a_waiting_watcher_is_woken_by_another_thread() -> None:
    async def work() -> None:
        hub = WatchHub(0)
        with hub.subscribe(0) as watch:
            assert await woken(watch, hub.publish, [event(1)], 1)
            assert drain(watch) == [1]
            assert not await watch.wait(0.01)
            assert await woken(watch, hub.compacted, 9)
            assert code_of(watch.take) == "compacted"

    async def woken(watch: Subscription, call: Any, *values: Any) -> bool:
        waiting = asyncio.ensure_future(watch.wait(5))
        await asyncio.sleep(0)
        assert not waiting.done()
        thread = threading.Thread(target=call, args=values)
        thread.start()
        thread.join()
        return await waiting

    asyncio.run(work())


def test_closing_ends_every_wait_and_opens_no_more() -> None:
    async def work() -> None:
        hub = WatchHub(0)
        with hub.subscribe(0) as watch:
            waits = [asyncio.ensure_future(watch.wait(5)), asyncio.ensure_future(hub.reached(7, 5))]
            await asyncio.sleep(0)
            hub.close()
            assert await asyncio.gather(*waits) == [True, False]
            assert watch.ended
        assert code_of(hub.subscribe, 0) == "shutting_down"
        hub.publish([event(1)], 1)  # the log may go on for a moment

    asyncio.run(work())


def test_reaching_a_revision_is_waited_for_within_a_bound() -> None:
    async def work() -> None:
        hub = WatchHub(3)
        assert await hub.reached(3, 0)
        assert not await hub.reached(4, 0.01)
        waiting = asyncio.ensure_future(hub.reached(6, 5))
        for revision in (4, 5, 6):
            await asyncio.sleep(0)
            threading.Thread(target=hub.publish, args=([], revision)).run()
        assert await waiting

    asyncio.run(work())


def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    async def work() -> None:
        hub = WatchHub(0)
        with hub.subscribe(0) as watch:
            waiting = asyncio.ensure_future(watch.wait(60))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert not hub._waiters

    asyncio.run(work())


def test_a_writer_and_readers_at_full_speed_lose_nothing() -> None:
    """The writer is a thread, as in the member; the ring is large enough, so nobody may be compacted."""
    total = 3_000

    async def follow(hub: WatchHub, wanted: str) -> list[int]:
        found: list[int] = []
        with hub.subscribe(0, lambda one: one.kind == wanted) as watch:
            while watch.position < total:
                found += [change.revision for change, _ in watch.take()]
                await watch.wait(0.5)
        return found

    async def work() -> None:
        hub = WatchHub(0, WatchLimits(max_events=total, max_bytes=1 << 30))
        readers = [asyncio.ensure_future(follow(hub, kind)) for kind in ("model", "version", "model")]
        await asyncio.sleep(0)

        def write() -> None:
            for revision in range(1, total + 1):
                hub.publish([event(revision, "model" if revision % 3 else "version")], revision)

        writer = threading.Thread(target=write)
        writer.start()
        models, versions, again = await asyncio.wait_for(asyncio.gather(*readers), 20)
        writer.join()
        assert models == again == [revision for revision in range(1, total + 1) if revision % 3]
        assert versions == list(range(3, total + 1, 3))

    asyncio.run(work())


class Interleavings(RuleBasedStateMachine):
    """Publishing, compaction, opening, reading and leaving in any order, against a plain list of everything that ever happened."""

    def __init__(self) -> None:
        super().__init__()
        self.hub = WatchHub(0, WatchLimits(max_events=12, max_bytes=40_000, take_changes=3))
        self.history: list[tuple[int, str]] = []  # every event that went through the hub
        self.revision = 0
        self.lost_up_to = 0  # by snapshots
        self.epoch = 0
        self.open: list[tuple[Subscription, int, str, list[int], int]] = []  # reader, opened from, kind ("" for all), what it got, epoch

    @rule(
        batch=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["model", "version", "rollout"])), max_size=8), tail=st.integers(0, 2)
    )
    def publish(self, batch: list[tuple[int, str]], tail: int) -> None:
        events = []
        revision = self.revision + 1
        for step, kind in batch:
            revision += step
            events.append(event(revision, kind))
        end = (events[-1].revision if events else self.revision) + tail
        self.hub.publish(events, end)
        self.history += [(one.revision, one.kind) for one in events]
        self.revision = end

    @rule(jump=st.integers(0, 5))
    def install_snapshot(self, jump: int) -> None:
        self.hub.compacted(self.revision + jump)
        self.revision += jump
        if jump:
            self.lost_up_to = self.revision

    @rule(back=st.integers(0, 5))
    def begin_again(self, back: int) -> None:
        """The state was wrong and is another one, which may not have come as far."""
        self.revision = max(0, self.revision - back)
        self.hub.begin_again(self.revision)
        self.epoch += 1
        self.history.clear()
        self.lost_up_to = self.revision

    @rule(back=st.integers(0, 30), kind=st.sampled_from(["", "model", "version"]))
    def subscribe(self, back: int, kind: str) -> None:
        start = max(0, self.revision - back)
        try:
            reader = self.hub.subscribe(start, (lambda one: one.kind == kind) if kind else None)
        except RaftmetaError as refused:
            assert refused.code == "compacted"
            assert start < self.hub.floor
        else:
            assert start >= self.hub.floor
            self.open.append((reader, start, kind, [], self.epoch))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 100))
    def read(self, which: int) -> None:
        at = which % len(self.open)
        reader, start, kind, got, epoch = self.open[at]
        before = reader.position
        try:
            chosen = reader.take()
        except RaftmetaError as refused:
            assert refused.code == "compacted"
            assert before < self.hub.floor or epoch < self.epoch
            with self.open.pop(at)[0]:
                return
        assert epoch == self.epoch, "read on over a state that was wrong"
        got += [change.revision for change, places in chosen for _ in places]
        assert reader.position >= before
        expected = [revision for revision, one in self.history if start < revision <= reader.position and kind in ("", one)]
        assert got == expected, "a gap, a repeat or another order"
        assert self.lost_up_to <= start or self.lost_up_to <= before, "read on over a snapshot"

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 100))
    def leave(self, which: int) -> None:
        with self.open.pop(which % len(self.open))[0]:
            pass

    @invariant()
    def is_bounded(self) -> None:
        events, size = self.hub.retained
        limits = self.hub.limits
        newest = sum(revision == self.history[-1][0] for revision, _ in self.history) if self.history else 0
        assert events <= max(limits.max_events, newest)
        assert size <= limits.max_bytes or len(self.hub._ring) - self.hub._start == 1
        assert self.hub.watchers == len(self.open)
        assert self.hub.floor <= self.hub.revision == self.revision


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_a_state_that_begins_again_ends_every_watch_wherever_it_stands_and_hands_out_nothing_of_before() -> None:
    hub = WatchHub(0)
    for revision in (1, 2, 3):
        hub.publish([event(revision)], revision)
    behind, level, ahead = hub.subscribe(1), hub.subscribe(3), hub.subscribe(9)
    hub.begin_again(2)
    assert {code_of(old.take) for old in (behind, level, ahead)} == {"compacted"}
    assert (hub.floor, hub.revision, hub.retained) == (2, 2, (0, 0))
    hub.publish([event(3), event(4)], 4)
    assert code_of(level.take) == "compacted", "and it stays so, however far the state comes"
    assert code_of(hub.subscribe, 1) == "compacted"
    assert drain(hub.subscribe(2)) == [3, 4]


def test_a_hub_that_began_again_names_no_revision_that_the_state_did_not_reach() -> None:
    """The next event takes the number that follows, and nobody may have been told before that it was sent."""
    hub = WatchHub(0)
    hub.publish([event(7)], 7)
    hub.begin_again(0)
    hub.compacted(7)  # everything came from another member
    with hub.subscribe(hub.revision) as watch:
        assert (drain(watch), watch.position) == ([], 7)
        hub.publish([event(8)], 8)
        assert (drain(watch), watch.position) == ([8], 8)


def test_a_watch_that_waits_or_is_about_to_is_woken_when_the_state_begins_again() -> None:
    async def work() -> None:
        hub = WatchHub(5)
        with hub.subscribe(5) as watch, hub.subscribe(5) as late:
            waiting = asyncio.ensure_future(watch.wait(5))
            await asyncio.sleep(0)
            hub.begin_again(5)
            assert await asyncio.wait_for(waiting, 1)
            assert await asyncio.wait_for(late.wait(5), 1)
            assert {code_of(watch.take), code_of(late.take)} == {"compacted"}

    asyncio.run(work())


def test_a_revision_of_a_state_that_began_again_is_reached_when_the_new_state_reaches_it() -> None:
    async def work() -> None:
        hub = WatchHub(5)
        hub.begin_again(0)
        waiting = asyncio.ensure_future(hub.reached(5, 5))
        await asyncio.sleep(0)
        hub.publish([event(4)], 4)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        hub.publish([event(5)], 5)
        assert await waiting

    asyncio.run(work())
