"""The time that commands are stamped with: no single clock decides it, it never runs back, and a corrected clock counts by itself."""

from __future__ import annotations

import pytest

from raftmeta.log.stamping import FORWARD, Stamping
from tests.support.trio import Trio, publish

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
NOW_MS = 1_800_000_000_000


class Clocks:
    """Of one member: a monotonic clock, and a wall clock that can be wrong by `offset_ms`."""

    def __init__(self, offset_ms: int = 0) -> None:
        self.now = 50.0
        self.offset_ms = offset_ms
        self.stamping = Stamping(lambda: self.now, lambda: self.true_ms + self.offset_ms)

    @property
    def true_ms(self) -> int:
        return NOW_MS + round((self.now - 50.0) * 1000)

    def hear(self, *offsets_ms: int) -> None:
        for number, offset_ms in enumerate(offsets_ms):
            self.stamping.heard(f"m{number + 2}", self.true_ms + offset_ms)

    def error_ms(self, term: int = 1) -> int:
        return self.stamping.stamp_ms(term) - self.true_ms


@pytest.mark.parametrize("wrong_ms", [2 * DAY_MS, -3 * HOUR_MS, -50 * 365 * DAY_MS])
def test_one_wrong_clock_of_three_moves_nothing_whoever_leads(wrong_ms: int) -> None:
    leader_is_wrong, other_is_wrong = Clocks(wrong_ms), Clocks()
    leader_is_wrong.hear(0, 0)
    other_is_wrong.hear(wrong_ms, 0)
    assert leader_is_wrong.error_ms() == other_is_wrong.error_ms() == 0
    assert leader_is_wrong.stamping.own_offset_ms() == wrong_ms
    assert other_is_wrong.stamping.own_offset_ms() == 0


@pytest.mark.parametrize("wrong_ms", [2 * DAY_MS, -2 * DAY_MS])
@pytest.mark.parametrize("leader_is_wrong", [True, False])
def test_of_two_clocks_that_contradict_each_other_the_logs_own_time_decides(wrong_ms: int, leader_is_wrong: bool) -> None:
    clocks = Clocks(wrong_ms if leader_is_wrong else 0)
    clocks.stamping.applied(clocks.true_ms)
    clocks.now += 600.0
    clocks.hear(0 if leader_is_wrong else wrong_ms)
    assert clocks.error_ms() == 0


def test_a_member_alone_has_its_own_clock_alone() -> None:
    assert Clocks(5 * HOUR_MS).error_ms() == 5 * HOUR_MS


def test_a_clock_that_is_set_right_counts_without_another_leader() -> None:
    clocks = Clocks(-3 * HOUR_MS)
    assert clocks.error_ms() == -3 * HOUR_MS
    clocks.offset_ms = 0
    errors = []
    while not errors or errors[-1]:
        clocks.now += 5.0
        errors.append(clocks.error_ms())
    assert errors == sorted(errors), "it approaches the right time from below"
    assert clocks.now - 50.0 == pytest.approx(3 * HOUR_MS / 1000 / FORWARD, abs=5.0)


def test_a_clock_that_jumps_wrongly_moves_the_stamps_slowly() -> None:
    clocks = Clocks()
    clocks.stamping.stamp_ms(1)
    clocks.offset_ms = 2 * DAY_MS
    clocks.now += 60.0
    assert clocks.error_ms() == 60_000 * FORWARD


@pytest.mark.parametrize("back_ms", [1, HOUR_MS, 90 * DAY_MS])
def test_stamps_never_run_back(back_ms: int) -> None:
    clocks = Clocks()
    stamps = [clocks.stamping.stamp_ms(1)]
    clocks.offset_ms = -back_ms
    for _ in range(100):
        clocks.now += 1.7
        stamps.append(clocks.stamping.stamp_ms(1))
    assert stamps == sorted(stamps)


def test_who_is_no_member_any_more_has_no_say() -> None:
    clocks = Clocks(HOUR_MS)
    clocks.hear(0, 0)
    clocks.stamping.keep(["m1", "m4"])
    assert clocks.error_ms() == HOUR_MS


@pytest.mark.parametrize("wrong_ms", [2 * DAY_MS, -2 * DAY_MS])
def test_members_tell_each_other_their_clocks_so_a_leader_with_a_wrong_one_stamps_the_right_time(wrong_ms: int) -> None:
    trio = Trio()
    leader = trio.leader()
    trio.wall_offsets_ms[leader.name] = wrong_ms
    trio.run(11.0)
    for number in range(3):
        results = trio.propose(leader, publish(f"v{number}"), f"k{number}")
        assert trio.run(5.0, lambda results=results: bool(results)) and results[0].code == "ok"
        assert abs(leader.replica.state.cluster_ms - trio.wall_ms()) < 10_000
    assert leader.replica.clock_offset_ms() == pytest.approx(wrong_ms, abs=10_000)


@pytest.mark.parametrize("data", [b"", b"-5", b"1e9", b"soon", b"9" * 15])
def test_what_is_no_clock_is_not_heard(data: bytes) -> None:
    trio = Trio()
    leader = trio.leader()
    before = leader.replica.clock_offset_ms()
    for peer in sorted(set(trio.boxes) - {leader.name}):
        trio.boxes[peer].replica.gossip("clock", data)
    trio.run(1.0)
    assert leader.replica.clock_offset_ms() == pytest.approx(before, abs=5)


@pytest.mark.parametrize("jump_ms", [HOUR_MS, -HOUR_MS])
@pytest.mark.parametrize("leads", [True, False], ids=["of the leader", "of a follower"])
def test_a_clock_that_jumps_an_hour_moves_no_leadership_expires_nothing_and_stamps_still_rise(leads: bool, jump_ms: int) -> None:
    trio = Trio()
    leader = trio.leader()
    first = trio.write(leader, "v0")
    trio.run(11.0)  # everybody has told its clock
    term, before = leader.replica.engine.term, leader.replica.state.cluster_ms
    trio.wall_offsets_ms[leader.name if leads else trio.follower().name] = jump_ms
    for number in range(1, 25):
        trio.write(leader, f"v{number}")
        after = leader.replica.state.cluster_ms
        assert before < after < trio.wall_ms() + 10_000
        before = after
        trio.run(1.0)
    assert trio.leader() is leader and leader.replica.engine.term == term
    again = trio.write(leader, "v0")  # under its first key, which would be forgotten if the outcome had expired
    assert again.outcome is not None and first.outcome is not None
    assert again.outcome.repeated and again.outcome.revision == first.outcome.revision
