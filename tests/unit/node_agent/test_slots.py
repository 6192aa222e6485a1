from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from node_agent.device import control_block
from node_agent.device.arena import Arena
from node_agent.device.control_block import ACTIVE, MAX_WORKERS, ControlBlock, count_index, pack_active, row_start
from node_agent.device.port import SlotRecord
from node_agent.device.process import this_process
from node_agent.refusal import Refusal
from node_agent.slots import MAX_RETRIES, Switch, WorkerGate


@pytest.fixture
def block(shm: Path) -> Iterator[ControlBlock]:
    made = ControlBlock.create(shm / "control")
    yield made
    made.close()


class ScriptedWords(list[int]):
    """The words of a block; before the n-th load of the active word `before[n]` happens, as if another processor did it."""

    def __init__(self, before: dict[int, Callable[[ScriptedWords], None]], always: Callable[[ScriptedWords], None] | None = None) -> None:
        super().__init__([0] * row_start(MAX_WORKERS - 1))
        self.before = before
        self.always = always
        self.loads = 0

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        if index == ACTIVE:
            if self.always is not None:
                self.always(self)
            self.before.get(self.loads, lambda _: None)(self)
            self.loads += 1
        return super().__getitem__(index)


class FakeBlock:
    """As much of a control block as a worker's gate uses."""

    def __init__(self, words: ScriptedWords) -> None:
        self.words = words
        self.acknowledged: list[int] = []

    def attach(self, worker_index: int) -> None: ...

    def acknowledge(self, worker_index: int, epoch: int) -> None:
        self.acknowledged.append(epoch)


def gate_over(words: ScriptedWords) -> tuple[WorkerGate, FakeBlock]:
    fake = FakeBlock(words)
    return WorkerGate(fake, 0), fake  # type: ignore[arg-type]


def counts(words: ScriptedWords) -> tuple[int, int]:
    return words[count_index(0, 0)], words[count_index(0, 1)]


def test_nothing_starts_before_the_first_switch(block: ControlBlock) -> None:
    gate = WorkerGate(block, 0)
    with pytest.raises(Refusal, match="nothing_serves"):
        gate.enter()
    assert not any(row.in_flight != (0, 0) for row in block.attached())


def test_a_request_is_counted_in_the_active_slot_until_it_leaves(block: ControlBlock) -> None:
    switch, gate = Switch(block), WorkerGate(block, 3)
    switch.switch(1)
    assert (gate.enter(), gate.enter()) == (1, 1)
    assert (switch.in_flight(0), switch.in_flight(1)) == (0, 2)
    gate.leave(1)
    gate.leave(1)
    assert switch.in_flight(1) == 0
    with pytest.raises(ValueError, match="leaves slot 1, which it has not entered"):
        gate.leave(1)


def test_a_switch_between_announcing_and_looking_again_moves_the_request_to_the_new_slot() -> None:
    words = ScriptedWords({1: lambda w: w.__setitem__(ACTIVE, pack_active(1, 2))})
    words[ACTIVE] = pack_active(0, 1)
    gate, fake = gate_over(words)
    assert gate.enter() == 1
    assert counts(words) == (0, 1), "the first announcement was withdrawn"
    assert fake.acknowledged == [2]


def test_a_switch_there_and_back_between_the_two_looks_is_noticed_by_the_epoch() -> None:
    words = ScriptedWords({1: lambda w: w.__setitem__(ACTIVE, pack_active(0, 3))})
    words[ACTIVE] = pack_active(0, 1)
    gate, fake = gate_over(words)
    assert gate.enter() == 0
    assert words.loads == 3, "announced again after the epoch had changed"
    assert counts(words) == (1, 0)
    assert fake.acknowledged == [3]


def test_a_worker_that_finds_a_switch_at_every_look_gives_up_and_leaves_no_count() -> None:
    words = ScriptedWords({}, always=lambda w: w.__setitem__(ACTIVE, list.__getitem__(w, ACTIVE) + (1 << 8)))
    gate, _ = gate_over(words)
    with pytest.raises(Refusal, match=rf"slot_busy.*{MAX_RETRIES} looks"):
        gate.enter()
    assert counts(words) == (0, 0)


def test_a_switch_stores_the_word_first_and_issues_the_barrier_second(block: ControlBlock) -> None:
    seen: list[tuple[int, int]] = []
    switch = Switch(block, barrier=lambda: seen.append(block.active()))
    reports = [switch.switch(0), switch.switch(1), switch.switch(0)]
    assert seen == [(0, 1), (1, 2), (0, 3)]
    assert [(report.slot, report.epoch) for report in reports] == seen
    assert all(report.call_us >= 0 for report in reports)


def test_the_old_slot_is_free_at_zero_in_flight_and_after_a_second_barrier(block: ControlBlock) -> None:
    barriers: list[int] = []
    switch, gate = Switch(block, barrier=lambda: barriers.append(switch.in_flight(0))), WorkerGate(block, 0)
    switch.switch(0)
    gate.enter()
    switch.switch(1)
    assert not switch.drained(0)
    assert barriers == [0, 1], "no barrier is spent while a request is in flight"
    gate.leave(0)
    assert switch.drained(0)
    assert barriers == [0, 1, 0]


def test_the_active_slot_is_never_drained(block: ControlBlock) -> None:
    switch = Switch(block)
    switch.switch(1)
    with pytest.raises(Refusal, match="slot_active"):
        switch.drained(1)


def test_waiting_for_a_slot_ends_at_the_deadline_and_names_the_worker(block: ControlBlock) -> None:
    switch, gate = Switch(block), WorkerGate(block, 7)
    switch.switch(0)
    gate.enter()
    switch.switch(1)
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds or 0.000_01

    with pytest.raises(Refusal, match=r"slot_busy.*1 in worker 7 for 0\.\d s"):
        switch.wait_drained(0, 101.0, lambda: now[0], sleep)
    assert 101.0 <= now[0] < 101.01
    now[0] = 100.0
    switch.wait_drained(0, 101.0, lambda: now[0], lambda _: gate.leave(0))


def test_an_epoch_is_acknowledged_when_every_attached_worker_has_seen_it(block: ControlBlock) -> None:
    switch = Switch(block)
    epoch = switch.switch(0).epoch
    assert not switch.acknowledged(epoch), "without workers nothing serves it"
    busy, idle = WorkerGate(block, 0), WorkerGate(block, 1)
    assert switch.waiting(epoch) == (0, 1)
    busy.enter()
    assert switch.waiting(epoch) == (1,)
    assert not switch.acknowledged(epoch)
    assert idle.acknowledge() == epoch
    assert switch.acknowledged(epoch)
    later = switch.switch(1).epoch
    assert switch.waiting(later) == (0, 1)
    assert switch.acknowledged(epoch), "a later slot includes the earlier order"


def test_a_slot_that_may_not_serve_is_not_switched_to(shm: Path, block: ControlBlock) -> None:
    arena = Arena.create(shm / "arena", 1)
    switch = Switch(block, require=arena.verified)
    arena.mark_dirty(0, SlotRecord(version="1"))
    arena.mark_verified(0, "f" * 64, "0" * 64)
    arena.mark_dirty(1, SlotRecord(version="2"))
    switch.switch(0)
    before = block.words.tolist()
    for _ in ("dirty", "empty"):
        with pytest.raises(Refusal, match="slot_not_verified"):
            switch.switch(1)
        assert block.words.tolist() == before
        arena.mark_empty(1)
    with pytest.raises(ValueError, match="outside"):
        switch.switch(2)


def test_a_second_control_is_refused(shm: Path, block: ControlBlock) -> None:
    Switch(block)
    with pytest.raises(Refusal, match="control_in_use"):
        Switch(ControlBlock.open(shm / "control"))


def test_a_restarted_control_goes_on_with_the_epoch_where_the_last_one_stopped(shm: Path) -> None:
    first = ControlBlock.create(shm / "control")
    Switch(first).switch(1)
    first.close()
    again = ControlBlock.open(shm / "control")
    assert again.active() == (1, 1)
    assert Switch(again).switch(0).epoch == 2
    again.close()


def test_the_layout_of_the_words_is_fixed() -> None:
    assert (ACTIVE, row_start(0), count_index(0, 0), count_index(0, 1), row_start(1)) == (0, 16, 18, 19, 32)
    assert (control_block._ACKNOWLEDGED, control_block._HEARTBEAT) == (4, 5)


def test_who_computes_in_a_slot_is_known_with_the_time_in_the_gate_and_beside_it(block: ControlBlock) -> None:
    switch, gate = Switch(block), WorkerGate(block, 3)
    switch.switch(1)
    assert gate.enter() == 1
    begun = block.row(3)
    assert begun is not None and begun.since_ns[0] == 0
    assert switch.held(1, begun.since_ns[1] + 2_500_000_000) == ((3, True, 2.5),)
    gate.leave(1)
    assert switch.held(1, begun.since_ns[1]) == ()
    gate.begin(0)
    assert [held[:2] for held in switch.held(0, begun.since_ns[1])] == [(3, False)]
    assert switch.drained(0), "what computes beside the gate keeps nobody out of the slot"
    gate.end(0)
    assert switch.held(0, begun.since_ns[1]) == ()


@pytest.mark.parametrize("word", range(8))
def test_a_bit_that_flipped_in_a_row_without_a_worker_holds_nothing_up_and_is_gone_once_a_worker_takes_the_row(
    block: ControlBlock, word: int
) -> None:
    switch, gate = Switch(block), WorkerGate(block, 0)
    block.words[row_start(40) + word] ^= 1 << 20
    epoch = switch.switch(0).epoch
    gate.acknowledge()
    assert switch.acknowledged(epoch) and switch.waiting(epoch) == ()
    assert switch.drained(1) and switch.in_flight(1) == 0
    assert switch.idle(0) and switch.held(0, 0) == switch.held(1, 0) == ()
    WorkerGate(block, 40)
    taken = block.row(40)
    assert taken is not None and (taken.in_flight, taken.acknowledged, taken.heartbeat_ns, taken.since_ns) == ((0, 0), 0, 0, (0, 0))
    assert taken.process == this_process()


@pytest.mark.parametrize("word", [0, 1])
def test_a_worker_that_lost_half_of_its_name_to_damage_still_holds_the_slot_it_uses(block: ControlBlock, word: int) -> None:
    switch, gate = Switch(block), WorkerGate(block, 3)
    switch.switch(1)
    gate.enter()
    switch.switch(0)
    block.words[row_start(3) + word] = 0
    assert not switch.drained(1)
    gate.leave(1)
    assert switch.drained(1)
