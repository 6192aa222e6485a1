"""Rows of the hardening list that concern a whole replica: recovery, room, membership, replication, snapshots."""

from __future__ import annotations

from pathlib import Path

import pytest

from raftmeta.core.errors import RaftmetaError
from raftmeta.log import configuration as cfg
from raftmeta.log.boot import StateLoader, recover
from raftmeta.log.configuration import MemberSpec, configuration_of
from raftmeta.log.exchange import ExchangeSettings
from raftmeta.log.guard import Rules
from raftmeta.log.journal import Journal, Tuning
from raftmeta.log.messages import AnyMessage, AppendEntries, AppendReply, PreVoteReply, SnapshotChunk
from raftmeta.log.peers import Received
from raftmeta.log.setup import LEADER, OP_MEMBERSHIP, Halted
from raftmeta.log.snapshots import SnapshotStore
from tests.support.memory_disk import MemoryDisk
from tests.support.trio import Trio, publish

both = pytest.mark.parametrize("on", [True, False], ids=["rule on", "rule off"])
SMALL = ExchangeSettings(entries=10, keep_entries=0)


def test_d2_a_kill_of_all_members_after_a_snapshot_loses_no_acknowledged_write() -> None:
    trio = Trio(exchange=SMALL)
    written = {f"v{number}" for number in range(35)}
    for label in sorted(written):
        assert trio.write(trio.leader(), label).code == "ok"
    disks = {name: trio.stop(name) for name in ("m1", "m2", "m3")}
    for disk in disks.values():
        disk.crash()
    for name, disk in disks.items():
        trio.boot(name, disk)
        assert trio.boxes[name].replica.engine.applied_index > 0  # the snapshot; the rest is in the journal
    trio.leader()
    trio.run(1.0)
    assert all(trio.labels(name) == written for name in trio.boxes)


def test_d2_a_journal_that_starts_behind_the_newest_sound_snapshot_is_refused() -> None:
    disk = MemoryDisk(1)
    journal = Journal.open(disk, Path("/j"), segment_bytes=1 << 20, tuning=Tuning())
    journal.set_hard_state(1, "")
    journal.reset(40, 1)
    journal.append(41, 1, b"\x01")
    journal.sync()
    with pytest.raises(RaftmetaError, match="reaches record 40") as refused:
        recover(journal, StateLoader(SnapshotStore(disk, Path("/s"))), None)
    assert refused.value.code == "integrity"


def test_d9_a_snapshot_older_than_what_is_applied_is_ignored() -> None:
    trio = Trio(exchange=SMALL)
    leader = trio.leader()
    for number in range(25):
        trio.write(leader, f"v{number}")
    trio.run(1.0)
    follower = trio.follower()
    applied, state = follower.replica.engine.applied_index, follower.replica.state
    stale = SnapshotChunk(leader.replica.engine.term, 3, 1, 10, b"\0" * 32, 0, b"0123456789", 1)
    follower.inbox.append(Received(leader.name, stale))
    trio.run(0.2)
    assert follower.replica.engine.applied_index >= applied and follower.replica.state is state
    assert "replaced" not in follower.told


def test_d4_a_leader_without_room_refuses_writes_and_hands_leadership_to_a_member_with_room() -> None:
    trio = Trio(segment_bytes=32 << 10, capacities={"m1": 320 << 10})
    assert trio.leader().name == "m1"
    codes = []
    for number in range(900):
        results = trio.propose(trio.leader(), publish(f"v{number}"), f"k{number}")
        assert trio.run(5.0, lambda results=results: bool(results))
        codes.append(results[0].code)
        if trio.leader().name != "m1":
            break
    assert "disk_full" in codes and trio.leader().name != "m1"
    assert "alarm disk_full" in trio.boxes["m1"].told
    acknowledged = {f"v{number}" for number, code in enumerate(codes) if code == "ok"}
    assert trio.write(trio.leader(), "after").code == "ok"
    trio.run(1.0)
    assert trio.labels(trio.leader().name) == acknowledged | {"after"}


def test_d4_when_nobody_has_room_the_leader_stays_and_reads_go_on() -> None:
    trio = Trio(segment_bytes=32 << 10, capacities=dict.fromkeys(("m1", "m2", "m3"), 320 << 10))
    code = ""
    for number in range(900):
        results = trio.propose(trio.leader(), publish(f"v{number}"), f"k{number}")
        assert trio.run(5.0, lambda results=results: bool(results))
        code = results[0].code
        if code == "disk_full":
            break
    assert code == "disk_full"
    term = trio.leader().replica.engine.term
    trio.run(5.0)
    assert trio.leader().replica.engine.term == term
    served: list[str] = []
    trio.follower().replica.read(3.0, lambda code, index: served.append(code))
    trio.run(1.0)
    assert served == ["ok"]


def test_r3_an_installed_snapshot_moves_commit_and_the_log_goes_on_behind_it() -> None:
    trio = Trio(exchange=SMALL, segment_bytes=32 << 10)
    leader = trio.leader()
    lagging = trio.follower().name
    disk = trio.stop(lagging)
    for number in range(60):
        trio.write(leader, f"v{number}")
    assert leader.journal.first_index > 20, "the journal was not compacted, the test would prove nothing"
    box = trio.boot(lagging, disk)
    assert trio.run(5.0, lambda: len(trio.labels(lagging)) == 60)
    assert "replaced" in box.told
    assert trio.write(trio.leader(), "after").code == "ok"
    trio.run(0.5)
    assert len({box.replica.state.state_hash for box in trio.boxes.values()}) == 1


def test_r3_a_snapshot_whose_bytes_are_not_what_was_announced_is_never_installed() -> None:
    trio = Trio(exchange=SMALL, segment_bytes=32 << 10)
    leader = trio.leader()
    lagging = trio.follower().name
    disk = trio.stop(lagging)
    for number in range(60):
        trio.write(leader, f"v{number}")
    box = trio.boot(lagging, disk)
    lied = 0

    def lie(sender: str, receiver: str, message: object) -> bool:
        nonlocal lied
        if isinstance(message, SnapshotChunk):
            lied += 1
            trio.boxes[receiver].inbox.append(Received(sender, _with_a_flipped_bit(message)))
            return True
        return False

    trio.drop = lie
    trio.run(0.4)
    assert lied > 0 and "replaced" not in box.told and len(trio.labels(lagging)) == 0
    trio.drop = lambda sender, receiver, message: False
    assert trio.run(8.0, lambda: len(trio.labels(lagging)) == 60)


def test_r5_an_entry_that_this_build_cannot_apply_stops_the_member_before_it_serves_a_guess() -> None:
    trio = Trio(rules=Rules(read_before_append=False))  # else it would not be appended
    leader = trio.leader()
    engine = leader.replica.engine
    engine._append(b"\x63 from the future")
    with pytest.raises(Halted, match="opcode 99"):
        trio.run(1.0)


@both
def test_r13_a_restarted_member_follows_the_configuration_of_its_log_not_the_configured_one(on: bool) -> None:
    disk = MemoryDisk(1)
    journal = Journal.open(disk, Path("/j"), segment_bytes=1 << 20, tuning=Tuning())
    journal.set_hard_state(1, "")
    grown = configuration_of(tuple(MemberSpec(name, "z", "", "") for name in ("m1", "m2", "m3")))
    journal.append(1, 1, bytes([OP_MEMBERSHIP]) + cfg.encode(grown))  # never committed here
    journal.sync()
    old = configuration_of((MemberSpec("m1", "z", "", ""),))
    recovered = recover(journal, StateLoader(SnapshotStore(disk, Path("/s"))), old, boot_from_log=on)
    assert (recovered.configurations[-1][1] == grown) is on
    assert not recovered.bootstrap


@both
def test_a_member_with_a_wiped_disk_does_not_help_to_elect_a_leader_without_an_acknowledged_write(on: bool) -> None:
    trio = Trio(rules=Rules(wiped_waits=on))
    leader = trio.leader().name
    lagging, wiped = [name for name in trio.boxes if name != leader]
    trio.write(trio.leader(), "before")
    trio.run(0.5)
    lagging_disk = trio.stop(lagging)
    assert trio.write(trio.leader(), "precious").code == "ok"  # on the leader and on the one whose disk goes now
    trio.stop(wiped)
    leader_disk = trio.stop(leader)
    trio.boot(lagging, lagging_disk)
    trio.boot(wiped, MemoryDisk(7))
    elected = trio.run(10.0, lambda: any(box.replica.engine.role == LEADER for box in trio.boxes.values()))
    assert elected is not on
    if on:
        trio.boot(leader, leader_disk)
        trio.leader()
        assert trio.run(5.0, lambda: all(trio.labels(name) == {"before", "precious"} for name in trio.boxes))
        assert "caught up" in trio.boxes[wiped].told


def test_a_member_that_was_wiped_stays_without_a_vote_over_restarts_until_it_has_caught_up() -> None:
    trio = Trio()
    trio.write(trio.leader(), "v1")
    wiped = trio.follower().name
    trio.stop(wiped)
    trio.drop = lambda sender, receiver, message: isinstance(message, AppendEntries) and receiver == wiped and message.commit_index > 0
    disk = MemoryDisk(9)
    trio.boot(wiped, disk)
    trio.run(0.5)
    box = trio.boot(wiped, trio.stop(wiped))
    assert box.replica.engine.joining
    trio.drop = lambda sender, receiver, message: False
    assert trio.run(5.0, lambda: not box.replica.engine.joining)
    assert not trio.boot(wiped, trio.stop(wiped)).replica.engine.joining


def test_an_empty_directory_without_a_marker_waits_and_never_stands() -> None:
    trio = Trio(names=("m1",))
    trio.boxes.clear()
    box = trio.boot("m1", MemoryDisk(2), None)
    trio.run(10.0)
    assert box.replica.engine.term == 0 and box.replica.engine.role != LEADER


def test_r14_a_suffix_of_fifty_divergent_entries_rejoins_in_a_few_round_trips() -> None:
    trio = Trio()
    old = trio.leader()
    others = [name for name in trio.boxes if name != old.name]
    trio.cut = {(old.name, other) for other in others} | {(other, old.name) for other in others}
    common = old.replica.engine.last_index
    for _ in range(50):
        old.replica.engine._append(b"\x01")
    trio.run(4.0, lambda: any(trio.boxes[name].replica.engine.role == LEADER for name in others))
    leader = trio.leader()
    for number in range(30):
        assert trio.write(leader, f"v{number}").code == "ok"
    assert old.replica.engine.last_index == common + 50
    replication = leader.replica.engine.replication
    replication.followers[old.name].probe_from(leader.replica.engine.last_index + 1, replication.round)  # as after another election
    refusals = 0

    def count(sender: str, receiver: str, message: object) -> bool:
        nonlocal refusals
        refusals += isinstance(message, AppendReply) and not message.matched and sender == old.name
        return False

    trio.cut, trio.drop = set(), count
    assert trio.run(3.0, lambda: len(trio.labels(old.name)) == 30)
    assert 1 <= refusals <= 5


def test_r15_a_follower_that_never_answered_gets_one_append_with_entries_and_is_asked_by_heartbeats_from_then_on() -> None:
    trio = Trio()
    sent: list[AppendEntries] = []

    def watch(sender: str, receiver: str, message: AnyMessage) -> bool:
        if receiver == "m3" and isinstance(message, AppendEntries):
            sent.append(message)
        return sender == "m3" and not isinstance(message, PreVoteReply)  # without which the cluster would not form

    trio.drop = watch
    leader = trio.leader()
    for number in range(30):
        assert trio.write(leader, f"v{number}").code == "ok"
        trio.run(0.1)
    with_entries = [message for message in sent if message.entries]
    assert len(with_entries) == 1
    assert {message.prev_index for message in sent if message.round > with_entries[0].round + 20} == {with_entries[0].prev_index}
    assert not leader.replica.engine.replication.followers["m3"].sent
    trio.drop = lambda sender, receiver, message: False
    assert trio.run(1.0, lambda: len(trio.labels("m3")) == 30)


@both
def test_r16_a_member_whose_term_is_ahead_is_back_within_two_election_timeouts(on: bool) -> None:
    trio = Trio(rules=Rules(answer_stale=on))
    leader = trio.leader()
    ahead = trio.follower()
    trio.write(leader, "v1")
    ahead.journal.set_hard_state(50, "")
    ahead.replica.engine._SyncObj__raftCurrentTerm = 50
    results = trio.propose(leader, publish("v2"), "k2", timeout_s=30.0)
    back = trio.run(3.0, lambda: trio.labels(ahead.name) == {"v1", "v2"})
    assert back is on
    assert bool(results)


def test_d4_a_member_short_of_room_takes_a_snapshot_to_let_segments_go() -> None:
    trio = Trio(segment_bytes=32 << 10, capacities={"m1": 640 << 10}, exchange=ExchangeSettings(entries=100_000, keep_entries=10_000))
    for number in range(700):
        assert trio.write(trio.leader(), f"v{number}").code in ("ok", "disk_full")
    assert trio.boxes["m1"].replica.snapshot_index > 0
    assert trio.boxes["m1"].journal.first_index > 1


def test_the_marker_is_used_up_by_the_first_commit_of_the_configuration() -> None:
    trio = Trio()
    trio.leader()
    trio.run(1.0)
    assert all("bootstrapped" in box.told for box in trio.boxes.values())
    disks = {name: trio.stop(name) for name in ("m1", "m2", "m3")}
    for name, disk in disks.items():
        assert trio.boot(name, disk, None).replica.engine.configuration == trio.marker
    trio.leader()


def _with_a_flipped_bit(chunk: SnapshotChunk) -> SnapshotChunk:
    data = bytearray(chunk.data)
    data[len(data) // 2] ^= 1
    return SnapshotChunk(chunk.term, chunk.index, chunk.index_term, chunk.size_bytes, chunk.sha256, chunk.offset, bytes(data), chunk.round)


def test_r6_what_the_library_would_do_with_versions_stops_the_member() -> None:
    engine = Trio().leader().replica.engine
    with pytest.raises(Halted, match="command queue"):
        engine._applyCommand(b"\x03\x01", None)
    with pytest.raises(Halted, match="apply"):
        engine._SyncObj__doApplyCommand(b"\x03\x01")
    assert engine.getCodeVersion() == 0


def test_r18_no_member_is_ever_an_observer_of_the_library() -> None:
    trio = Trio()
    leader, follower = trio.leader(), trio.follower()
    trio.write(leader, "v1")
    trio.boot(follower.name, trio.stop(follower.name))
    trio.run(2.0)
    assert all(box.replica.engine.readonlyNodes == set() for box in trio.boxes.values())
