"""A member that a majority contradicts, or whose journal is damaged, sets itself aside and begins again without a vote."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from raftmeta.core.errors import RaftmetaError
from raftmeta.log import quarantine
from raftmeta.log.boot import Recovered, StateLoader, recover
from raftmeta.log.guard import Rules
from raftmeta.log.hard_state import Owner
from raftmeta.log.journal import Journal, JournalCorrupt, Tuning
from raftmeta.log.messages import AnyMessage, StateReport
from raftmeta.log.opening import Openers, Whose, open_log
from raftmeta.log.quarantine import KEPT_NAME, Quarantine
from raftmeta.log.setup import LEADER
from raftmeta.log.snapshots import SnapshotStore
from tests.support.memory_disk import MemoryDisk, PowerLost
from tests.support.trio import Box, Trio

DATA = Path("/data")
SEGMENT = DATA / "journal"
OWNER = Owner("trio", "m2")  # whom Trio lets follow first


def diverge(box: Box) -> None:
    """Its state becomes another one, as if it had applied a command in its own way."""
    state = box.replica.state
    box.replica.state = msgspec.structs.replace(state, hash_sum=state.hash_sum ^ (1 << 200))


def compared(trio: Trio) -> None:
    """Long enough for the leader's own report and for whoever is set aside to catch up."""
    trio.run(15.0)


def journal(disk: MemoryDisk) -> Journal:
    return Journal.open(disk, DATA / "journal", segment_bytes=1 << 20, tuning=Tuning(owner=OWNER))


def opened(disk: MemoryDisk, *, has_peers: bool = True) -> tuple[Journal, Recovered]:
    store = SnapshotStore(disk, DATA / "snapshots", "trio")
    openers = Openers(lambda: journal(disk), lambda found: recover(found, StateLoader(store), None))
    return open_log(disk, DATA, openers, Whose(OWNER, has_peers))


def hashes(trio: Trio) -> set[bytes]:
    return {box.replica.state.state_hash for box in trio.boxes.values()}


def test_a_follower_with_another_state_is_set_aside_and_comes_back_with_the_right_one() -> None:
    trio = Trio()
    leader, follower = trio.leader(), trio.follower()
    trio.write(leader, "v1")
    diverge(follower)
    compared(trio)
    again = trio.boxes[follower.name]
    assert again.told.count("set aside") == 1
    assert "caught up" in again.told
    assert len(hashes(trio)) == 1
    assert again.disk.exists(DATA / KEPT_NAME / "record")
    assert any(name.startswith("segment-") for name in again.disk.listdir(DATA / KEPT_NAME / "journal"))
    assert "alarm over integrity" in trio.leader().told


@pytest.mark.parametrize("on", [True, False], ids=["rule on", "rule off"])
def test_of_five_two_that_are_wrong_go_one_after_the_other_and_all_are_right_again(on: bool) -> None:
    trio = Trio(names=("m1", "m2", "m3", "m4", "m5"), rules=Rules(one_set_aside=on))
    leader = trio.leader()
    trio.write(leader, "v1")
    trio.run(0.5)
    first, second = [box for name, box in sorted(trio.boxes.items()) if box is not leader][:2]
    diverge(first)
    second.replica.state = msgspec.structs.replace(second.replica.state, hash_sum=second.replica.state.hash_sum ^ (1 << 100))
    together: list[int] = []

    def note() -> bool:
        together.append(sum(box.replica.engine.joining for box in trio.boxes.values()))
        return False

    trio.run(40.0, note)
    told = trio.boxes[first.name].told.count("set aside"), trio.boxes[second.name].told.count("set aside")
    assert told == (1, 1)
    assert len(hashes(trio)) == 1
    assert max(together) == (1 if on else 2)


def test_a_leader_that_did_not_hear_a_report_asks_again() -> None:
    trio = Trio()
    leader = trio.leader()
    trio.write(leader, "v1")
    trio.run(0.5)
    diverge(leader)
    lost: list[str] = []

    def lose_the_first(sender: str, receiver: str, message: AnyMessage) -> bool:
        first = receiver == leader.name and isinstance(message, StateReport) and sender not in lost
        lost.extend([sender] * first)
        return first

    trio.drop = lose_the_first
    for box in trio.boxes.values():
        box.replica._reports._told.clear()
        box.replica._reports._comparison._reports.clear()
    trio.run(25.0)
    assert len(lost) == 2
    assert "set aside" in trio.boxes[leader.name].told
    assert len(hashes(trio)) == 1


def test_a_member_with_a_wrong_state_and_a_full_disk_begins_again_from_it_and_is_right() -> None:
    trio = Trio()
    leader, follower = trio.leader(), trio.follower()
    trio.write(leader, "v1")
    diverge(follower)
    follower.disk.capacity_bytes = follower.disk.used_bytes()
    compared(trio)
    again = trio.boxes[follower.name]
    assert again is not follower and "set aside" in again.told
    assert not again.replica.engine.joining and not again.disk.exists(DATA / quarantine.MARK_NAME)
    assert len(hashes(trio)) == 1


def test_without_the_rule_the_wrong_state_stays_and_only_the_alarm_tells() -> None:
    trio = Trio(rules=Rules(set_aside=False))
    leader, follower = trio.leader(), trio.follower()
    trio.write(leader, "v1")
    diverge(follower)
    compared(trio)
    assert len(hashes(trio)) == 2
    assert "alarm integrity" in follower.told


def test_a_leader_with_another_state_steps_down_and_is_set_aside() -> None:
    trio = Trio()
    leader = trio.leader()
    trio.write(leader, "v1")
    diverge(leader)
    compared(trio)
    assert "set aside" in trio.boxes[leader.name].told
    assert leader.replica.engine.role != LEADER
    assert trio.leader().name != leader.name
    assert len(hashes(trio)) == 1
    assert trio.write(trio.leader(), "v2").code == "ok"


def test_reads_are_refused_until_the_member_has_caught_up() -> None:
    trio = Trio()
    trio.write(trio.leader(), "v1")
    follower = trio.follower()
    seen: list[str] = []
    follower.replica.engine.joining = True
    follower.replica.read(1.0, lambda code, index: seen.append(code))
    follower.replica.engine.joining = False
    follower.replica.read(1.0, lambda code, index: seen.append(code))
    trio.run(1.0)
    assert seen == ["starting", "ok"]


def two_that_differ(rules: Rules) -> tuple[Trio, Box, Box, MemoryDisk]:
    """The leader, a follower with another state, and the disk of the third member, which is down."""
    trio = Trio(rules=rules)
    leader = trio.leader()
    trio.write(leader, "v1")
    trio.run(0.5)
    away, other = (box for box in trio.boxes.values() if box is not leader)
    disk = trio.stop(away.name)
    diverge(other)
    trio.run(12.0)
    return trio, trio.leader(), other, disk


def test_two_that_differ_without_a_third_write_nothing_and_nobody_is_chosen() -> None:
    trio, leader, other, disk = two_that_differ(Rules())
    assert {box.told.count("set aside") for box in trio.boxes.values()} == {0}
    assert "alarm integrity" in leader.told
    assert trio.write(leader, "v2").code == "integrity"
    seen: list[str] = []
    leader.replica.read(1.0, lambda code, index: seen.append(code))
    trio.run(1.0)
    assert seen == ["ok"]
    trio.boot(next(name for name in ("m1", "m2", "m3") if name not in trio.boxes), disk)
    compared(trio)
    assert "set aside" in trio.boxes[other.name].told
    assert len(hashes(trio)) == 1
    assert trio.write(trio.leader(), "v3").code == "ok"


def test_without_the_hold_writes_go_on_between_two_that_differ() -> None:
    trio, leader, _, _ = two_that_differ(Rules(hold_undecided=False))
    assert trio.write(leader, "v2").code == "ok"


@pytest.mark.parametrize(("rules", "second"), [(Rules(), 0), (Rules(one_set_aside=False), 1)])
def test_while_one_is_set_aside_no_second_one_is(rules: Rules, second: int) -> None:
    trio = Trio(rules=rules)
    leader, follower = trio.leader(), trio.follower()
    trio.write(leader, "v1")
    trio.run(0.5)
    third = next(box for box in trio.boxes.values() if box not in (leader, follower))
    third.replica.engine.joining = True  # set aside, and not yet caught up
    trio.cut = {(leader.name, third.name)}
    third.replica._reports.connected(leader.name)
    third.replica._reports.connected(follower.name)
    for box in (leader, follower):
        box.replica._reports.connected(third.name)  # it began again
    trio.run(0.1)
    revision, right = leader.replica.state.revision, leader.replica.state.state_hash
    diverge(follower)
    follower.replica._reports._comparison._reports.clear()
    for box in (leader, third):
        follower.replica._reports._comparison._reports.setdefault(box.name, {})[revision] = right
    follower.replica._reports.connected(leader.name)
    trio.run(11.0)
    assert trio.boxes[follower.name].told.count("set aside") == second


def test_a_member_that_must_be_set_aside_again_before_somebody_looked_stops() -> None:
    trio = Trio()
    leader, follower = trio.leader(), trio.follower()
    trio.write(leader, "v1")
    diverge(follower)
    compared(trio)
    diverge(trio.boxes[follower.name])
    trio.write(trio.leader(), "v2")
    with pytest.raises(RaftmetaError, match=r"set aside before.*remove it") as caught:
        compared(trio)
    assert caught.value.code == "integrity"


def damaged(trio: Trio, name: str) -> MemoryDisk:
    """The disk of a member that was stopped, with a flipped bit in a record below its mark."""
    trio.run(1.0)  # quiet: the mark covers everything
    disk = trio.stop(name)
    segment = next(file for file in disk.listdir(SEGMENT) if file.startswith("segment-"))
    disk.flip(SEGMENT / segment, 3 * 4096 + 40)
    with pytest.raises(JournalCorrupt):
        journal(disk.clone())
    return disk


def test_d10_a_damaged_record_is_taken_from_the_others_and_never_cut() -> None:
    trio = Trio()
    leader, follower = trio.leader(), trio.follower()
    for number in range(5):
        trio.write(leader, f"v{number}")
    disk = damaged(trio, follower.name)
    term = leader.replica.engine.term
    again = trio.boot(follower.name, disk)
    assert again.replica.engine.joining
    assert again.replica.engine.term >= term  # what it promised goes along
    assert again.journal.last_index == 0
    compared(trio)
    assert not again.replica.engine.joining
    assert len(hashes(trio)) == 1
    kept = quarantine.set_aside_before(disk, DATA)
    assert kept is not None
    assert kept.cause == "journal_damaged"


def test_d10_a_damaged_record_is_refused_when_nobody_else_has_it() -> None:
    trio = Trio()
    trio.write(trio.leader(), "v1")
    disk = damaged(trio, trio.follower().name)
    before = {name: disk.contents(SEGMENT / name) for name in disk.listdir(SEGMENT)}
    with pytest.raises(JournalCorrupt):
        opened(disk, has_peers=False)
    assert {name: disk.contents(SEGMENT / name) for name in disk.listdir(SEGMENT)} == before


def test_a_vote_of_the_term_is_not_given_twice() -> None:
    disk = MemoryDisk(1)
    first = journal(disk)
    first.set_hard_state(7, "m2")
    first.append(1, 7, b"\x01")
    first.sync()
    first.close()
    quarantine.mark(disk, DATA, Quarantine("state_differs", "because", first.term, first.voted_for))
    again, recovered = opened(disk)
    assert recovered.joining
    assert (again.term, again.voted_for, again.last_index) == (7, "m2", 0)


def test_setting_aside_can_be_cut_off_anywhere_and_ends_with_everything_kept() -> None:
    for call in range(200):
        disk = MemoryDisk(call)
        first = journal(disk)
        first.set_hard_state(3, "m1")
        for index in range(1, 6):
            first.append(index, 3, b"\x00payload")
        first.sync()
        first.close()
        evidence = {name: disk.contents(SEGMENT / name) for name in disk.listdir(SEGMENT) if name.startswith("segment-")}
        quarantine.mark(disk, DATA, Quarantine("state_differs", "because", 3, "m1"))
        disk.crash_at(call)
        try:
            quarantine.finish(disk, DATA, OWNER)
            finished = True
        except PowerLost:
            finished = False
        disk.crash()
        again, recovered = opened(disk)
        assert recovered.joining, call
        assert (again.term, again.voted_for, again.last_index) == (3, "m1", 0), call
        kept = DATA / KEPT_NAME / "journal"
        assert {name: disk.contents(kept / name) for name in disk.listdir(kept) if name in evidence} == evidence, call
        if finished:
            return
    raise AssertionError("never finished")
