"""A member that a majority contradicts leads no more and answers nothing, whether or not it may set itself aside already."""

from __future__ import annotations

import msgspec
import pytest

from raftmeta.core.state import State
from raftmeta.log.exchange import ExchangeSettings
from raftmeta.log.guard import Rules
from raftmeta.log.integrity import MAX_REVISIONS
from raftmeta.log.messages import SnapshotChunk, StateReport, TimeoutNow
from raftmeta.log.peers import Connected, Disconnected, Received
from raftmeta.log.reports import ABSENT_S
from raftmeta.log.setup import LEADER
from tests.support.trio import Box, Trio

FIVE = ("m1", "m2", "m3", "m4", "m5")
both = pytest.mark.parametrize("on", [True, False], ids=["rule on", "rule off"])


def make_wrong(box: Box) -> State:
    """Its records are sound and others than its log says, as a defect of apply would leave them."""
    state = box.replica.state
    box.replica.state = msgspec.structs.replace(state, cluster_ms=state.cluster_ms + 10**9)
    return box.replica.state


def read_at(trio: Trio, box: Box) -> list[str]:
    seen: list[str] = []
    box.replica.read(1.0, lambda code, index: seen.append(code))
    trio.run(2.0, lambda: bool(seen))
    return seen


def with_one_that_was_never_heard(rules: Rules, exchange: ExchangeSettings | None = None) -> tuple[Trio, Box]:
    """Five of which m5 linked up and went away before it said that it is sound, and the leader, whose state is wrong."""
    trio = Trio(names=FIVE, rules=rules, exchange=exchange)
    trio.write(trio.leader(), "v1")
    trio.stop("m5")
    trio.run(2.0)
    for box in trio.boxes.values():
        box.inbox += [Connected("m5", 99), Disconnected("m5")]
    trio.run(1.0)
    leader = trio.leader()
    make_wrong(leader)
    trio.write(leader, "wrong")
    return trio, leader


@both
def test_a_leader_that_a_majority_contradicts_leads_no_more_although_it_may_not_set_itself_aside_yet(on: bool) -> None:
    trio, wrong = with_one_that_was_never_heard(Rules(contradicted_stands_by=on))
    trio.run(15.0)
    assert "set aside" not in wrong.told and "alarm integrity" in wrong.told
    assert (wrong.replica.engine.role != LEADER) is on
    now = trio.leader()
    if on:
        assert trio.write(now, "v2").code == "ok"
        assert read_at(trio, now) == ["ok"]
    assert read_at(trio, wrong) == (["integrity"] if on else ["ok"])
    assert bool(wrong.replica.contradiction) is on
    assert ("contradicted" in wrong.told) is on, "its watches end"


def test_a_contradicted_member_votes_and_acknowledges_but_never_stands() -> None:
    trio, wrong = with_one_that_was_never_heard(Rules())
    trio.run(15.0)
    leader = trio.leader()
    term = leader.replica.engine.term
    wrong.inbox.append(Received(leader.name, TimeoutNow(term)))
    trio.run(1.0)
    assert trio.leader() is leader and leader.replica.engine.term == term
    trio.stop(leader.name)  # of five three are left, and one of them may not lead
    again = trio.leader()
    assert again is not wrong
    assert trio.write(again, "v3").code == "ok"
    deadline = wrong.replica.engine.next_deadline()
    assert deadline == float("inf"), "it does not wait for an election that it cannot win"


def test_a_member_that_is_away_for_long_keeps_a_contradicted_one_waiting_no_more() -> None:
    trio, wrong = with_one_that_was_never_heard(Rules())
    trio.run(ABSENT_S / 2)
    assert "set aside" not in wrong.told
    trio.run(ABSENT_S)
    again = trio.boxes[wrong.name]
    assert again.told.count("set aside") == 1 and "caught up" in again.told
    assert not again.replica.contradiction
    assert len({box.replica.state.state_hash for box in trio.boxes.values()}) == 1


def test_a_contradicted_member_waits_for_one_that_left_before_it_said_what_it_holds() -> None:
    trio = Trio(names=FIVE)
    trio.write(trio.leader(), "v1")
    trio.run(2.0)
    leader = trio.leader()
    wrong, away = [name for name in FIVE if name != leader.name][:2]
    make_wrong(trio.boxes[wrong])
    disk = trio.stop(away)  # it may be wrong too, and about to begin again with nothing
    trio.write(leader, "v2")
    trio.run(ABSENT_S / 2)
    told = trio.boxes[wrong].told
    assert "alarm integrity" in told and "set aside" not in told
    trio.boot(away, disk)
    trio.run(15.0)
    assert trio.boxes[wrong].told.count("set aside") == 1 and "caught up" in trio.boxes[wrong].told
    assert len({box.replica.state.state_hash for box in trio.boxes.values()}) == 1


def test_a_read_that_waits_when_its_member_is_contradicted_is_not_answered_from_its_state() -> None:
    trio, wrong = with_one_that_was_never_heard(Rules())
    others = [name for name in FIVE[:4] if name != wrong.name]
    seen: list[str] = []
    trio.cut = {(name, wrong.name) for name in others}  # the round of the read is not confirmed
    wrong.replica.read(5.0, lambda code, index: seen.append(code))
    trio.run(0.1)
    assert seen == []
    trio.cut = set()
    for name in others:
        report = trio.boxes[name].replica._reports
        report._told.clear()
        report.connected(wrong.name)
    wrong.replica._reports._note_own()
    trio.run(0.05)
    assert seen == ["integrity"]


def test_a_contradicted_member_takes_no_snapshot_so_that_a_restart_does_not_begin_with_what_was_wrong_in_memory() -> None:
    trio, wrong = with_one_that_was_never_heard(Rules(), ExchangeSettings(entries=8, keep_entries=0))
    trio.run(15.0)
    assert wrong.replica.contradiction
    for number in range(20):
        trio.write(trio.leader(), f"x{number}")
    trio.run(1.0)
    assert wrong.replica.snapshot_index == 0 and trio.leader().replica.snapshot_index > 8
    again = trio.boot(wrong.name, trio.stop(wrong.name))
    trio.run(1.0)
    assert again.replica.state.state_hash == trio.leader().replica.state.state_hash


def test_reports_of_revisions_that_nobody_reached_blind_nobody() -> None:
    trio = Trio()
    leader = trio.leader()
    trio.write(leader, "v1")
    liar, victim = (box for box in trio.boxes.values() if box is not leader)
    for box in (leader, victim):
        box.inbox += [Received(liar.name, StateReport((1 << 40) + number, b"\1" * 32)) for number in range(MAX_REVISIONS)]
        box.inbox += [Received(liar.name, StateReport(-1, b"\1" * 32)), Received(liar.name, StateReport(5, bytes(1 << 20)))]
    trio.run(0.5)
    assert all(len(said) == 32 for said in victim.replica._reports._comparison._reports[liar.name].values())
    make_wrong(victim)
    trio.write(leader, "v2")
    trio.run(15.0)
    assert "set aside" in trio.boxes[victim.name].told
    assert len({box.replica.state.state_hash for box in trio.boxes.values()}) == 1


@both
def test_of_two_that_are_wrong_alike_the_leader_hands_its_state_to_nobody(on: bool) -> None:
    """Snapshots have compacted the journal: who begins again gets one, and must not get it of a member that is wrong."""
    exchange = ExchangeSettings(entries=10, keep_entries=0, keep_bytes=0)
    trio = Trio(names=FIVE, rules=Rules(contradicted_stands_by=on), exchange=exchange, segment_bytes=17 << 10)
    trio.write(trio.leader(), "a")
    trio.boxes["m1"].replica.transfer("m2")
    trio.run(3.0)
    leader = trio.leader()
    assert leader.name == "m2"
    for number in range(45):
        trio.write(leader, f"x{number}")
    trio.run(0.5)
    for name in ("m1", "m2"):
        make_wrong(trio.boxes[name])
    for number in range(25):
        trio.write(leader, f"y{number}")
    senders: set[str] = set()

    def watch(sender: str, receiver: str, message: object) -> bool:
        if isinstance(message, SnapshotChunk):
            senders.add(sender)
        return not on and "m2" in senders  # seen; what would follow is a member that ends

    trio.drop = watch
    trio.run(30.0)
    assert ("m2" in senders) is not on
    if on:
        assert {trio.boxes[name].told.count("set aside") for name in ("m1", "m2")} == {1}
        assert len({box.replica.state.state_hash for box in trio.boxes.values()}) == 1
        assert trio.write(trio.leader(), "b").code == "ok"
