"""How fast a lost leader is noticed without a healthy one being deposed (R8), and how leadership moves on request (R17)."""

from __future__ import annotations

from pathlib import Path

import pytest

from raftmeta.log.guard import Rules
from raftmeta.log.messages import PreVote, PreVoteReply, TimeoutNow
from raftmeta.log.peers import Connected, Disconnected
from raftmeta.log.proposals import Result
from raftmeta.log.setup import LEADER, Timing
from tests.support.lone_engine import LoneEngine, payload
from tests.support.lone_engine import trio as trio_of
from tests.support.trio import Trio, publish

both = pytest.mark.parametrize("on", [True, False], ids=["rule on", "rule off"])


def close_link(trio: Trio, one: str, other: str) -> None:
    trio.cut |= {(one, other), (other, one)}
    trio.boxes[one].inbox.append(Disconnected(other))
    trio.boxes[other].inbox.append(Disconnected(one))


def open_link(trio: Trio, one: str, other: str) -> None:
    trio.cut -= {(one, other), (other, one)}
    trio.boxes[one].inbox.append(Connected(other, trio.boxes[other].incarnation))
    trio.boxes[other].inbox.append(Connected(one, trio.boxes[one].incarnation))


def granted(lone: LoneEngine, peer: str) -> list[bool]:
    lone.step((peer, PreVote(lone.engine.term, 9, 9)))
    return [reply.granted for reply in lone.sent_to(peer, PreVoteReply)]  # type: ignore[union-attr]


@both
def test_r8_a_closed_link_to_the_leader_starts_a_pre_vote_after_one_heartbeat(on: bool) -> None:
    trio = Trio(rules=Rules(closed_link_counts=on))
    trio.stop(trio.leader().name)
    assert trio.run(0.25, lambda: bool(trio._leaders())) is on
    assert trio.run(3.0, lambda: bool(trio._leaders()))


def test_r8_a_follower_whose_link_closed_asks_no_sooner_than_after_one_heartbeat() -> None:
    lone = LoneEngine(terms=(1,))
    lone.step(("m2", lone.append((1, 1), term=1)))
    lone.engine.disconnected("m2")
    lone.step(after_s=0.09)
    assert not lone.sent_to("m3", PreVote)
    lone.step(after_s=0.02)
    assert lone.sent_to("m3", PreVote) == [PreVote(1, 1, 1)]
    assert lone.engine.term == 1


@both
def test_r8_a_reconnect_of_one_follower_does_not_depose_a_healthy_leader(on: bool) -> None:
    trio = Trio(rules=Rules(pre_vote=on))
    leader, follower = trio.leader(), trio.follower()
    trio.run(0.3)
    term = leader.replica.engine.term
    close_link(trio, leader.name, follower.name)
    trio.run(0.8)  # the other follower is asked again and again, and hears the leader
    open_link(trio, leader.name, follower.name)
    trio.run(1.0)
    assert (trio.leader() is leader and leader.replica.engine.term == term) is on
    if on:
        assert trio.write(follower, "after").code == "ok"


def test_r8_links_that_close_and_open_again_within_a_heartbeat_depose_nobody() -> None:
    trio = Trio()
    leader = trio.leader()
    term = leader.replica.engine.term
    followers = [name for name in trio.boxes if name != leader.name]
    for _ in range(20):
        for name in followers:
            close_link(trio, leader.name, name)
        trio.run(0.08)
        for name in followers:
            open_link(trio, leader.name, name)
        trio.run(0.03)  # too short for a heartbeat, now and then
    trio.run(0.5)
    assert trio.leader() is leader and leader.replica.engine.term == term


def test_r8_links_to_the_leader_that_never_carry_anything_again_do_not_keep_it_for_ever() -> None:
    trio = Trio()
    leader = trio.leader()
    followers = [name for name in trio.boxes if name != leader.name]
    trio.drop = lambda sender, receiver, message: leader.name in (sender, receiver)
    for _ in range(40):
        for name in followers:
            close_link(trio, leader.name, name)
        trio.run(0.05)
        for name in followers:
            open_link(trio, leader.name, name)
        trio.run(0.05)
    assert {trio.boxes[name].replica.engine.leader_id for name in followers} <= set(followers)


def test_r8_a_vote_is_refused_while_the_leader_is_heard_and_given_once_its_link_closed() -> None:
    lone = LoneEngine(terms=(1,))
    lone.step(("m2", lone.append((1, 1), term=1)))
    assert granted(lone, "m3") == [False]
    lone.engine.disconnected("m2")
    assert granted(lone, "m3") == [True]
    lone.engine.connected("m2", 1)
    assert granted(lone, "m3") == [False]
    lone.engine.disconnected("m2")
    lone.engine.connected("m2", 2)  # restarted: it leads no more
    assert granted(lone, "m3") == [True]


def test_r8_a_closed_link_to_another_follower_changes_nothing() -> None:
    lone = LoneEngine(terms=(1,))
    lone.step(("m2", lone.append((1, 1), term=1)))
    lone.engine.disconnected("m3")
    lone.step(after_s=0.5)
    assert not lone.sent_to("m2", PreVote)
    assert granted(lone, "m3") == [False]


def test_r8_what_was_granted_before_the_link_closed_counts_for_nothing() -> None:
    lone = LoneEngine(terms=(1,))
    lone.step(("m2", lone.append((1, 1), term=1)))
    lone.step(after_s=1.6)
    assert lone.sent_to("m3", PreVote)
    lone.step(("m2", lone.append((1, 1), term=1)), ("m3", PreVoteReply(1, 1, True)))  # the leader was only slow
    lone.engine.disconnected("m2")
    lone.step(after_s=0.2)
    assert lone.engine.term == 1 and lone.sent_to("m3", PreVote)


@pytest.mark.parametrize(("members", "asks_after_s"), [(("m1", "m2", "m3"), 0.1), (("m0", "m1", "m2"), 0.15)], ids=["first", "second"])
def test_r8_two_that_lose_the_leader_at_once_ask_half_a_heartbeat_apart(members: tuple[str, ...], asks_after_s: float) -> None:
    lone = LoneEngine(terms=(1,), configuration=trio_of(*members))
    lone.step(("m2", lone.append((1, 1), term=1)))
    lone.engine.disconnected("m2")
    lone.step(after_s=asks_after_s - 0.01)
    assert not any(isinstance(message, PreVote) for _, message in lone.sent)
    lone.step(after_s=0.02)
    assert any(isinstance(message, PreVote) for _, message in lone.sent)


def test_a_member_that_is_alone_leads_at_once_and_one_of_three_waits() -> None:
    for members, leads in ((("m1",), True), (("m1", "m2", "m3"), False)):
        lone = LoneEngine(configuration=trio_of(*members))
        lone.step(after_s=0.01)
        assert (lone.engine.role == LEADER) is leads
        assert not lone.sent


@both
def test_r17_a_transfer_waits_until_the_target_holds_everything(on: bool) -> None:
    lone = LoneEngine(rules=Rules(wait_for_successor=on))
    lone.elect()
    lone.waiting = [payload("x")]
    lone.step()
    assert lone.engine.transfer("m2") is on
    lone.waiting = [payload("y")]
    lone.step()
    if on:
        assert not lone.sent_to("m2", TimeoutNow) and lone.waiting, "a new proposal went first"
        lone.step(("m2", lone.ack(lone.engine.last_index)))
        assert lone.sent_to("m2", TimeoutNow) == [TimeoutNow(lone.engine.term)]
        lone.step()
        assert not lone.sent_to("m2", TimeoutNow), "asked twice"


def test_r17_a_transfer_under_writes_leaves_no_caller_without_an_answer_and_none_in_doubt() -> None:
    trio = Trio()
    old, target = trio.leader(), trio.follower()
    results: list[list[Result]] = []
    for number in range(200):
        results.append(trio.propose(old, publish(f"v{number}"), f"k{number}"))
        if number == 100:
            assert old.replica.transfer(target.name)
        trio.run(0.01)
    assert trio.run(3.0, lambda: all(results))
    assert {result.code for found in results for result in found} == {"ok"}
    assert trio.leader() is target


def test_r17_when_the_target_does_not_stand_proposals_go_on_after_one_election_timeout() -> None:
    trio = Trio()
    trio.drop = lambda sender, receiver, message: isinstance(message, TimeoutNow)
    leader, target = trio.leader(), trio.follower()
    assert leader.replica.transfer(target.name)
    trio.run(0.1)
    results = trio.propose(leader, publish("v1"), "k1")
    trio.run(0.8)
    assert not results
    assert trio.run(0.3, lambda: bool(results))
    assert results[0].code == "ok" and trio.leader() is leader


def test_r17_who_does_not_lead_hands_nothing_over() -> None:
    trio = Trio()
    leader, follower = trio.leader(), trio.follower()
    assert not follower.replica.transfer(leader.name)
    assert not leader.replica.transfer("nobody")
    trio.stop(follower.name)
    trio.run(0.05)
    assert not leader.replica.transfer(follower.name)


def test_r9_a_leader_whose_disk_stalls_for_two_election_timeouts_is_replaced_before_its_sync_returns() -> None:
    """Its heartbeats come from the thread that waits for the disk, so a leader that can commit nothing keeps nobody from leading."""
    trio = Trio()
    stalled = trio.leader()
    meanwhile: list[str] = []

    def stall(call: str, path: Path) -> None:
        if call == "fdatasync" and not trio.stuck:
            trio.stuck.add(stalled.name)
            trio.run(3.0)
            (leader,) = (box for box in trio.boxes.values() if box is not stalled and box.replica.engine.role == LEADER)
            meanwhile.append(trio.write(leader, "meanwhile").code)
            stalled.disk.on_call = None

    stalled.disk.on_call = stall
    results = trio.propose(stalled, publish("stalled"), "key-stalled")
    trio.run(0.1)
    assert meanwhile == ["ok"]
    trio.stuck.clear()
    trio.run(0.02)
    assert stalled.replica.engine.role != LEADER
    trio.run(3.0)
    assert len({box.replica.state.state_hash for box in trio.boxes.values()}) == 1
    assert (results[0].code == "ok") == (stalled.replica.state.outcome("key-stalled") is not None)


def test_a_leader_whose_sync_never_returns_is_replaced_within_two_election_timeouts_and_a_second() -> None:
    trio = Trio()
    hung = trio.leader()
    trio.stuck.add(hung.name)  # its thread waits for the disk; its links stay up
    within_s = 2 * Timing().election_max_s + 1.0
    others = [box for box in trio.boxes.values() if box is not hung]
    assert trio.run(within_s, lambda: any(box.replica.engine.may_serve_reads for box in others))
    (leader,) = (box for box in others if box.replica.engine.role == LEADER)
    assert trio.write(leader, "without-it").code == "ok"
