"""A cluster forms once, of members of whom none holds anything; and what was committed then goes for no other cluster."""

from __future__ import annotations

import pytest

from raftmeta.log.guard import Rules
from raftmeta.log.messages import AnyMessage, PreVoteReply
from raftmeta.log.setup import LEADER, Halted
from tests.support.lone_engine import LoneEngine, entry
from tests.support.memory_disk import MemoryDisk
from tests.support.trio import Box, Trio

both = pytest.mark.parametrize("on", [True, False], ids=["rule on", "rule off"])


def test_a_cluster_forms_once_everyone_was_heard_and_from_then_on_any_two_will_do() -> None:
    trio = Trio()
    disk = trio.stop("m3")
    trio.run(5.0)
    assert all(box.replica.engine.joining for box in trio.boxes.values())
    assert {box.replica.engine.founders_unheard for box in trio.boxes.values()} == {("m3",)}
    third = trio.boot("m3", disk, trio.marker)
    assert trio.run(3.0, lambda: any(box.replica.engine.role == LEADER for box in trio.boxes.values()))
    assert trio.write(trio.leader(), "v1").code == "ok"
    trio.run(0.5)
    assert {box.replica.engine.founders_unheard for box in trio.boxes.values()} == {()}
    trio.stop(third.name if trio.leader() is not third else "m1")
    assert trio.write(trio.leader(), "v2").code == "ok"


def acknowledged_without(trio: Trio, missing: str) -> tuple[MemoryDisk, MemoryDisk]:
    """Everyone has v0; v1 is on the leader and one follower only. The disks of that leader and of the one that misses v1, all stopped."""
    leader = trio.leader()
    assert trio.write(leader, "v0").code == "ok"
    trio.run(1.0)
    late = trio.stop(missing)
    assert trio.write(leader, "v1").code == "ok"
    trio.run(1.0)
    return trio.stop(leader.name), late


@both
def test_a_wiped_member_that_gets_its_marker_again_does_not_help_to_elect_a_leader_without_an_acknowledged_write(on: bool) -> None:
    trio = Trio(rules=Rules(ask_before_founding=on))
    wiped, late = (name for name in ("m1", "m2", "m3") if name != trio.leader().name)
    leader = trio.leader().name
    whole, missing_one = acknowledged_without(trio, late)
    trio.stop(wiped)
    trio.boot(wiped, MemoryDisk(7), trio.marker)
    trio.boot(late, missing_one)
    trio.run(20.0)
    led = [box for box in trio.boxes.values() if box.replica.engine.role == LEADER]
    if not on:
        assert led and "v1" not in trio.labels(led[0].name)
        return
    assert not led
    trio.boot(leader, whole)
    trio.run(5.0)
    assert all(trio.labels(name) == {"v0", "v1"} for name in trio.boxes)
    assert "caught up" in trio.boxes[wiped].told


@both
def test_two_wiped_members_that_get_their_markers_again_form_no_second_cluster(on: bool) -> None:
    trio = Trio(rules=Rules(ask_before_founding=on))
    trio.write(trio.leader(), "v1")
    trio.run(1.0)
    disk, _, _ = (trio.stop(name) for name in ("m1", "m2", "m3"))
    for name in ("m2", "m3"):
        trio.boot(name, MemoryDisk(7), trio.marker)
    trio.run(10.0)
    assert any(box.replica.engine.role == LEADER for box in trio.boxes.values()) is not on
    last = trio.boot("m1", disk)
    trio.run(10.0)
    if on:
        assert last.journal.last_index > 0
        assert not last.replica.engine.joining
        assert all(box.replica.engine.joining for box in trio.boxes.values() if box is not last)


def test_a_member_that_has_the_vote_keeps_it_over_a_crash_and_one_that_has_not_does_not_get_it_by_one() -> None:
    trio = Trio()
    trio.write(trio.leader(), "v1")
    disk = trio.stop("m3")
    disk.crash(keep=0.0)
    assert not trio.boot("m3", disk).replica.engine.joining
    trio.stop("m3")
    trio.cut = {(peer, "m3") for peer in ("m1", "m2")}
    wiped = trio.boot("m3", MemoryDisk(9))
    trio.run(1.0)
    disk = trio.stop("m3")
    disk.crash(keep=1.0)
    assert wiped.replica.engine.joining
    assert trio.boot("m3", disk).replica.engine.joining


def test_the_vote_of_a_member_that_caught_up_is_durable_before_it_is_given() -> None:
    trio = Trio()
    trio.write(trio.leader(), "v1")
    trio.stop("m3")
    again: Box = trio.boot("m3", MemoryDisk(9))
    assert trio.run(5.0, lambda: not again.replica.engine.joining)
    assert not again.journal.joining and not again.journal._hard.state.promise.joining


def test_a_peer_that_holds_something_says_so() -> None:
    trio = Trio()
    trio.write(trio.leader(), "v1")
    said: dict[str, bool] = {}

    def note(sender: str, receiver: str, message: AnyMessage) -> bool:
        if isinstance(message, PreVoteReply):
            said[sender] = message.empty
        return False

    trio.drop = note
    trio.stop("m3")
    trio.boot("m3", MemoryDisk(9), trio.marker)
    trio.run(0.5)
    assert said == {"m1": False, "m2": False}


@both
def test_r1_no_leader_replaces_what_an_earlier_life_knew_to_be_committed(on: bool) -> None:
    engine = LoneEngine(rules=Rules(keep_committed=on), terms=(1, 1, 1, 1), committed=3)
    append = engine.append((1, 1), (entry(2, 5), entry(3, 5)), term=5)
    if not on:
        with pytest.raises(ValueError, match="what is committed, 3"):  # the journal would not do it either
            engine.step(("m2", append))
        return
    with pytest.raises(Halted, match="entry 2 is committed here in term 1, the leader sent term 5"):
        engine.step(("m2", append))
    assert engine.terms() == [1, 1, 1, 1]


def test_r1_what_was_not_known_to_be_committed_gives_way() -> None:
    engine = LoneEngine(terms=(1, 1, 1, 1), committed=3)
    engine.step(("m2", engine.append((3, 1), (entry(4, 5),), term=5)))
    assert engine.terms() == [1, 1, 1, 5]
