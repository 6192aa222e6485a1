"""The protocol rows of the hardening list: each rule on our layer, and what happens with that one rule off.

Every test runs twice: with all rules, where the behaviour must hold, and with its rule off, where it must be seen to fail.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from raftmeta.log.guard import Rules
from raftmeta.log.messages import AppendEntries, AppendReply, PreVote, PreVoteReply, RequestVote, TimeoutNow, VoteReply
from raftmeta.log.progress import MAX_INFLIGHT_MESSAGES, Progress
from raftmeta.log.setup import FOLLOWER, LEADER, Halted
from raftmeta.log.wall import Peer
from tests.support.lone_engine import LoneEngine, entry, payload, trio

both = pytest.mark.parametrize("on", [True, False], ids=["rule on", "rule off"])


def rules(name: str, on: bool) -> Rules:
    return Rules(**{name: on})


@both
def test_r1_a_resent_append_keeps_the_entries_behind_it(on: bool) -> None:
    lone = LoneEngine(rules=rules("keep_matching", on), terms=(1, 1, 1, 1, 1))
    lone.step(("m2", lone.append((1, 1), (entry(2, 1),))))
    assert (lone.journal.last_index == 5) is on


def test_r1_only_the_conflict_and_what_follows_it_goes() -> None:
    lone = LoneEngine(terms=(1, 1, 2, 2, 2))
    lone.step(("m2", lone.append((1, 1), (entry(2, 1), entry(3, 3)), term=3)))
    assert lone.terms() == [1, 1, 3]
    assert lone.sent_to("m2", AppendReply) == [AppendReply(3, True, 4, 1)]


def test_r1_a_conflict_below_commit_halts_before_anything_is_changed() -> None:
    lone = LoneEngine(terms=(1, 1, 1))
    lone.step(("m2", lone.append((3, 1), commit=3)))
    assert lone.engine.commit_index == 3
    with pytest.raises(Halted, match="entry 2 is committed here in term 1"):
        lone.step(("m2", lone.append((1, 1), (entry(2, 2),), term=2)))
    assert lone.terms() == [1, 1, 1]


def test_r1_a_heartbeat_in_the_middle_of_the_log_acknowledges_only_what_it_proves() -> None:
    lone = LoneEngine(terms=(1, 1, 1, 1))
    lone.step(("m2", lone.append((2, 1), term=2, commit=4)))
    assert lone.sent_to("m2", AppendReply) == [AppendReply(2, True, 3, 1)]
    assert lone.engine.commit_index == 2
    assert lone.journal.last_index == 4


@both
def test_r2_an_acknowledgement_of_an_earlier_term_counts_for_nothing(on: bool) -> None:
    lone = LoneEngine(rules=rules("drop_stale_terms", on))
    lone.elect()
    lone.waiting = [payload("x")]
    lone.step()
    before = lone.engine.commit_index
    lone.step(("m2", lone.ack(lone.engine.last_index, term=lone.engine.term - 1)))
    lone.step()
    assert (lone.engine.commit_index == before) is on


@both
def test_r3_commit_does_not_move_over_a_suffix_that_was_not_matched(on: bool) -> None:
    lone = LoneEngine(rules=rules("match_before_commit", on), terms=(1, 1, 1, 1))
    lone.step(("m2", lone.append((2, 1), term=2, commit=4)))
    assert (lone.engine.commit_index == 2) is on


@both
def test_r4_a_second_membership_change_waits_for_the_first(on: bool) -> None:
    lone = LoneEngine(rules=rules("one_change_at_a_time", on))
    lone.elect()
    assert lone.engine.change_configuration(trio("m1", "m2", "m3", "m4")) is None
    refused = lone.engine.change_configuration(trio("m1", "m2", "m3", "m4", "m5"))
    assert (refused == "an earlier change is not committed yet") is on
    if on:
        assert lone.engine.configuration == trio("m1", "m2", "m3", "m4")
        lone.step(*((peer, lone.ack(lone.engine.last_index)) for peer in ("m2", "m3")))
        lone.step()
        assert lone.engine.change_configuration(trio("m1", "m2", "m3", "m4", "m5")) is None


def test_r4_two_members_at_once_are_refused_and_nothing_is_appended() -> None:
    lone = LoneEngine()
    lone.elect()
    last = lone.engine.last_index
    assert lone.engine.change_configuration(trio("m1", "m2", "m3", "m4", "m5")) == "one member at a time"
    assert lone.engine.last_index == last and lone.engine.configuration == trio()


def test_r4_a_truncated_change_is_undone() -> None:
    lone = LoneEngine()
    lone.elect()
    committed = lone.engine.last_index
    assert lone.engine.change_configuration(trio("m1", "m2", "m3", "m4")) is None
    lone.step()
    term = lone.engine.term
    lone.step(("m2", lone.append((committed, term), (entry(committed + 1, term + 1),), term=term + 1)))
    assert lone.engine.configuration == trio()


@both
def test_r7_one_voter_is_one_vote(on: bool) -> None:
    lone = LoneEngine(rules=rules("voters_once", on), configuration=trio("m1", "m2", "m3", "m4", "m5"))
    lone.step(after_s=1.6)
    lone.step(*((peer, PreVoteReply(0, 0, True)) for peer in ("m2", "m3")))
    vote = VoteReply(lone.engine.term, True)
    lone.step(("m2", vote), ("m2", vote))
    assert (lone.engine.role != LEADER) is on


def test_r7_the_vote_of_a_stranger_does_not_count() -> None:
    lone = LoneEngine()
    lone.step(after_s=1.6)
    lone.step(("m2", PreVoteReply(0, 0, True)))
    lone.step(("m9", VoteReply(lone.engine.term, True)))
    assert lone.engine.role != LEADER


@both
def test_r8_a_member_that_cannot_win_does_not_raise_its_term(on: bool) -> None:
    lone = LoneEngine(rules=rules("pre_vote", on))
    for _ in range(5):
        lone.step(after_s=1.6)
    assert (lone.engine.term == 0) is on


@both
def test_r8_a_follower_that_hears_its_leader_does_not_vote(on: bool) -> None:
    lone = LoneEngine(rules=rules("pre_vote", on), terms=(1,))
    lone.step(("m2", lone.append((1, 1), term=1)))
    lone.step(("m3", RequestVote(5, 9, 4, False)), after_s=0.5)
    assert (lone.engine.term == 1 and lone.engine.leader_id == "m2") is on
    lone.step(("m3", PreVote(1, 9, 4)))
    granted = [reply.granted for reply in lone.sent_to("m3", PreVoteReply)]  # type: ignore[union-attr]
    assert granted == [False] or not on


def test_a_leader_that_is_silent_for_an_election_timeout_is_no_longer_called_the_leader() -> None:
    lone = LoneEngine(terms=(1,))
    lone.step(("m2", lone.append((1, 1), term=1)))
    assert lone.engine.leader_id == "m2"
    lone.step(after_s=1.6)
    assert lone.engine.leader_id == "" and lone.engine.term == 1


@both
def test_r9_a_leader_that_slept_through_an_election_timeout_steps_down_before_its_inbox(on: bool) -> None:
    lone = LoneEngine(rules=rules("check_quorum", on))
    lone.elect()
    lone.waiting = [payload("x")]
    lone.step()
    before = lone.engine.commit_index
    lone.step(("m2", lone.ack(lone.engine.last_index)), ("m3", lone.ack(lone.engine.last_index)), after_s=1.1)
    lone.step()
    assert (lone.engine.role == FOLLOWER and lone.engine.commit_index == before) is on


def test_r11_a_large_entry_travels_whole() -> None:
    lone = LoneEngine()
    lone.elect()
    big = payload("x" * (3 << 20))
    lone.waiting = [big]
    lone.step()
    (message,) = [m for m in lone.sent_to("m2", AppendEntries) if m.entries]  # type: ignore[union-attr]
    assert [e.payload for e in message.entries] == [big]  # type: ignore[union-attr]
    follower = LoneEngine(terms=(1,))
    follower.journal.set_hard_state(1, "")
    follower.step(("m2", AppendEntries(1, 1, 1, 0, 1, (entry(2, 1, "y" * (3 << 20)),))))
    assert follower.sent_to("m2", AppendReply) == [AppendReply(1, True, 3, 1)]


@both
def test_r14_a_refusal_names_the_followers_commit_index_plus_one(on: bool) -> None:
    lone = LoneEngine(rules=rules("jump_back", on), terms=(1,) * 60)
    lone.step(("m2", lone.append((10, 1), term=1, commit=10)))
    lone.step(("m3", lone.append((200, 3), term=3)))
    (reply,) = lone.sent_to("m3", AppendReply)
    assert (reply == AppendReply(3, False, 11, 1)) is on


def test_r14_a_late_refusal_never_moves_next_below_match_plus_one() -> None:
    progress = Progress(next_index=90)
    progress.on_matched(80, 5)
    progress.on_refused(3, 6, 7)
    assert progress.next == 81
    progress.on_sent(95, 100, 0.0)
    progress.on_refused(3, 7, 9)  # was under way before the step back: tells nothing new
    assert progress.next == 96


@both
def test_r15_a_follower_that_does_not_answer_gets_a_window_and_no_more(on: bool) -> None:
    lone = LoneEngine(rules=rules("window", on), terms=(1,) * 3)
    lone.elect()
    chunk = payload("x" * (1 << 20))
    for _ in range(12):
        lone.waiting.append(chunk)
        lone.step(("m2", lone.ack(lone.engine.last_index)))
    sent = 0
    progress = lone.engine.replication.followers["m3"]
    for size, _ in ((size, last) for last, size in progress.sent):
        sent += size
    assert (sent <= (9 << 20) and len(progress.sent) <= MAX_INFLIGHT_MESSAGES) is on


def test_r15_while_a_snapshot_is_not_ready_a_tick_sends_one_heartbeat_and_ends() -> None:
    lone = LoneEngine(terms=(1,) * 50)
    lone.elect()
    lone.engine.replication.followers["m3"].next = 0  # needs what the journal does not hold
    for _ in range(20):
        lone.step(("m2", lone.ack(lone.engine.last_index)), after_s=0.11)
        assert len(lone.sent_to("m3", AppendEntries)) <= 1


@both
def test_r16_a_member_with_a_stale_term_is_told_the_newer_one(on: bool) -> None:
    lone = LoneEngine(rules=rules("answer_stale", on), terms=(7,))
    lone.step(("m2", lone.append((1, 7), term=3)))
    assert (lone.sent_to("m2", AppendReply) == [AppendReply(7, False, 1, 1)]) is on


@both
def test_r16_the_leader_moves_to_a_higher_term_by_electing_itself_at_once(on: bool) -> None:
    lone = LoneEngine(rules=rules("answer_stale", on))
    lone.elect()
    lone.step(("m3", AppendReply(9, False, 1, 1)))
    asked = lone.sent_to("m2", RequestVote)
    assert (bool(asked) and lone.engine.term == 10) is on


def test_r17_a_transfer_is_exempt_from_stickiness() -> None:
    lone = LoneEngine(terms=(1,))
    lone.step(("m2", lone.append((1, 1), term=1)))
    lone.step(("m3", RequestVote(2, 1, 1, True)))
    assert lone.sent_to("m3", VoteReply) == [VoteReply(2, True)]
    lone = LoneEngine(terms=(1,))
    lone.step(("m2", lone.append((1, 1), term=1)))
    lone.step(("m2", TimeoutNow(1)))
    assert [vote.transfer for vote in lone.sent_to("m3", RequestVote)] == [True]  # type: ignore[union-attr]


@both
def test_r19_a_single_member_commits_nothing_before_its_sync(on: bool) -> None:
    lone = LoneEngine(rules=rules("count_self_synced", on), configuration=trio("m1"))
    lone.elect()
    lone.waiting = [payload("x")]
    before = lone.engine.commit_index
    for _ in range(3):
        lone.step(sync=False)
    assert (lone.engine.commit_index == before) is on
    lone.journal.sync()
    lone.step()
    assert lone.engine.commit_index == lone.engine.last_index


@both
def test_r19_a_single_member_applies_nothing_in_the_tick_in_which_it_wins(on: bool) -> None:
    """Its bootstrap entry used up the marker before the entry was durable: after power loss it belonged to no cluster."""
    lone = LoneEngine(rules=rules("count_self_synced", on), configuration=trio("m1"))
    lone.step(after_s=1.6, sync=False)
    assert lone.engine.role == LEADER
    assert (lone.applied == []) is on
    lone.journal.sync()
    lone.step()
    assert lone.applied == [(1, 1)]


def test_r20_peers_hash_the_same_in_every_process() -> None:
    script = "from raftmeta.log.wall import Peer; print(hash(Peer('m1')), [p.id for p in {Peer(f'member-{i}') for i in range(9)}])"
    seen = {
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(seen) == 1
    assert hash(Peer("m1")) != hash(Peer("m2"))


@both
def test_c1_reads_wait_for_an_entry_of_the_current_term(on: bool) -> None:
    lone = LoneEngine(rules=rules("read_after_noop", on), terms=(1, 1))
    lone.step(after_s=1.6)
    lone.step(("m2", PreVoteReply(1, 1, True)))
    lone.step(("m2", VoteReply(lone.engine.term, True)))
    assert lone.engine.role == LEADER
    assert (not lone.engine.may_serve_reads) is on


def test_messages_that_contradict_themselves_change_nothing() -> None:
    lone = LoneEngine(terms=(1, 1))
    for message in (
        AppendEntries(2, 2, 1, 0, 1, (entry(5, 2),)),
        AppendEntries(2, 2, 1, 0, 1, (entry(3, 3),)),
        AppendEntries(2, 2, 2, 0, 1, (entry(3, 1),)),
        AppendEntries(2, -1, 0, 0, 1, ()),
    ):
        lone.step(("m2", message))
        assert lone.terms() == [1, 1] and lone.engine.term == 1
    assert lone.engine.violations == 4


def test_a_follower_that_claims_more_than_the_log_holds_is_not_believed() -> None:
    lone = LoneEngine()
    lone.elect()
    lone.step(("m2", AppendReply(lone.engine.term, True, 1 << 60, lone.engine.replication.round)))
    assert lone.engine.match_indexes["m2"] <= lone.engine.last_index
    assert lone.engine.violations == 1
