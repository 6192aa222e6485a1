"""Rows of the hardening list that concern callers of a replica: how commands end, reads, repeats, what another member forwards."""

from __future__ import annotations

import msgspec
import pytest

from raftmeta.core.commands import Body
from raftmeta.core.state import decode_outcome
from raftmeta.core.types import Outcome
from raftmeta.log import messages
from raftmeta.log.exchange import ExchangeSettings
from raftmeta.log.guard import Rules
from raftmeta.log.messages import AppendEntries, AppendReply, Forward, ForwardReply, Proposal, ProposalReply
from raftmeta.log.peers import Received
from raftmeta.log.proposals import MAX_QUEUED, Pending, Proposals, Result, encode_body
from raftmeta.nodes import NodeTable
from tests.support.trio import Trio, publish

both = pytest.mark.parametrize("on", [True, False], ids=["rule on", "rule off"])
SMALL = ExchangeSettings(entries=10, keep_entries=0)


def test_r12_without_a_leader_a_command_ends_as_no_leader_at_its_deadline() -> None:
    trio = Trio()
    results = trio.propose(trio.boxes["m3"], publish("v1"), "k", timeout_s=0.3)
    trio.run(0.5)
    assert [result.code for result in results] == ["no_leader"]


def test_r12_a_leader_cut_off_ends_its_commands_as_unknown_and_a_retry_finds_the_truth() -> None:
    trio = Trio()
    old = trio.leader()
    others = [name for name in trio.boxes if name != old.name]
    trio.cut = {(old.name, other) for other in others} | {(other, old.name) for other in others}
    results = trio.propose(old, publish("v1"), "k", timeout_s=30.0)
    trio.run(1.5, lambda: bool(results))
    assert [result.code for result in results] == ["unknown_outcome"]
    trio.cut = set()
    retried = trio.propose(trio.leader(), publish("v1"), "k")
    assert trio.run(5.0, lambda: bool(retried))
    assert retried[0].code == "ok" and retried[0].outcome is not None
    trio.run(1.0)
    assert all(trio.labels(name) == {"v1"} for name in trio.boxes)


def test_r12_every_way_of_ending_calls_the_sink_once() -> None:
    ended: list[Result] = []
    proposals = Proposals(1)
    make = lambda key: Pending(Proposal(0, key, "me", "m1", encode_body(publish(key))), 10.0, ended.append)  # noqa: E731
    proposals.submit(make("a"))
    batch = proposals.next_batch(1)
    assert batch is not None
    proposals.appended(5, 2, batch.waiting)
    proposals.applied(5, 3, ())  # another term's entry took its place
    assert [result.code for result in ended] == ["not_applied"]
    proposals.submit(make("b"))
    (forwarded,) = proposals.take_forwards(1 << 20)
    proposals.lost_leader()
    proposals.answered(forwarded.id, Result("ok"))
    assert [result.code for result in ended] == ["not_applied", "unknown_outcome"]
    proposals.submit(make("c"))
    proposals.take_forwards(1 << 20)
    proposals.expire(11.0)
    assert ended[-1].code == "unknown_outcome"
    for number in range(MAX_QUEUED + 1):
        proposals.submit(make(f"q{number}"))
    assert ended[-1].code == "overloaded"
    big = Pending(Proposal(0, "big", "me", "m1", b"x" * (5 << 20)), 10.0, ended.append)
    proposals.submit(big)
    assert ended[-1].code == "body_too_large"
    proposals.end_queued("shutting_down")
    assert len(ended) == 5 + MAX_QUEUED


def test_r12_a_command_that_no_majority_takes_ends_at_its_deadline_and_a_retry_finds_the_truth() -> None:
    trio = Trio()
    leader = trio.leader()
    trio.drop = lambda sender, receiver, message: isinstance(message, AppendEntries) and bool(message.entries)  # heartbeats pass
    first = trio.propose(leader, publish("v1"), "k", timeout_s=3.0)
    assert trio.run(4.0, lambda: bool(first)), "its leader leads on, so nothing else would end it"
    assert first[0].code == "unknown_outcome" and trio.leader() is leader
    trio.drop = lambda sender, receiver, message: False
    again = trio.propose(leader, publish("v1"), "k")
    assert trio.run(5.0, lambda: bool(again)) and again[0].code == "ok"
    assert len(first) == 1 and trio.labels(leader.name) == {"v1"}


def test_r12_commands_of_one_entry_end_each_at_its_own_deadline_and_once() -> None:
    ended: list[tuple[str, str]] = []
    proposals = Proposals(1)
    for key, deadline in (("early", 5.0), ("late", 50.0)):
        sink = lambda found, key=key: ended.append((key, found.code))  # noqa: E731
        proposals.submit(Pending(Proposal(0, key, "me", "m1", encode_body(publish(key))), deadline, sink))
    batch = proposals.next_batch(1)
    assert batch is not None
    proposals.appended(5, 2, batch.waiting)
    proposals.expire(4.9)
    assert ended == []
    proposals.expire(5.0)
    proposals.expire(6.0)
    assert ended == [("early", "unknown_outcome")]
    proposals.applied(5, 2, (Outcome(1, "ok"), Outcome(2, "ok")))
    assert ended == [("early", "unknown_outcome"), ("late", "ok")]
    proposals.expire(100.0)
    proposals.lost_leadership()
    assert len(ended) == 2


@both
def test_c1_a_leader_that_cannot_reach_a_majority_serves_no_read(on: bool) -> None:
    trio = Trio(rules=Rules(confirm_reads=on))
    old = trio.leader()
    others = [name for name in trio.boxes if name != old.name]
    trio.cut = {(old.name, other) for other in others} | {(other, old.name) for other in others}
    answers: list[str] = []
    old.replica.read(0.9, lambda code, index: answers.append(code))
    trio.run(1.2)
    assert ("ok" not in answers) is on
    assert answers


def test_c1_a_read_never_joins_a_round_that_began_before_it() -> None:
    trio = Trio()
    leader = trio.leader()
    held: list[tuple[str, object]] = []
    trio.drop = lambda sender, receiver, message: isinstance(message, AppendReply) and bool(held.append((sender, message)) or True)
    first: list[int] = []
    second: list[int] = []
    leader.replica.read(5.0, lambda code, index: first.append(index))
    trio.run(0.05)
    leader.replica.read(5.0, lambda code, index: second.append(index))
    for sender, message in held:
        leader.inbox.append(Received(sender, message))  # type: ignore[arg-type]
    trio.run(0.03)
    assert first and not second
    trio.drop = lambda sender, receiver, message: False
    trio.run(0.5)
    assert second


def test_c1_a_follower_reads_its_own_state_at_an_index_that_the_leader_confirmed() -> None:
    trio = Trio()
    trio.write(trio.leader(), "v1")
    follower = trio.follower()
    seen: list[set[str]] = []
    follower.replica.read(3.0, lambda code, index: seen.append(trio.labels(follower.name)))
    assert trio.run(3.0, lambda: bool(seen))
    assert seen == [{"v1"}]
    assert follower.replica.staleness_s() < 1.0


def test_c2_one_key_is_applied_once_across_members_leaders_and_restarts() -> None:
    trio = Trio(exchange=SMALL)
    first = trio.propose(trio.leader(), publish("v1"), "the-key")
    trio.run(2.0, lambda: bool(first))
    for number in range(20):
        trio.write(trio.leader(), f"w{number}")
    old = trio.leader().name
    disk = trio.stop(old)
    again = trio.propose(trio.follower(), publish("v1"), "the-key")
    assert trio.run(5.0, lambda: bool(again))
    trio.boot(old, disk)
    trio.run(2.0)
    third = trio.propose(trio.boxes[old], publish("v1"), "the-key")
    assert trio.run(5.0, lambda: bool(third))
    answers = [results[0].outcome for results in (first, again, third)]
    assert all(answer is not None and answer.code == "ok" for answer in answers)
    assert len({answer.revision for answer in answers if answer}) == 1
    stored = trio.boxes[old].replica.state.outcomes.get("the-key")
    assert stored is not None and decode_outcome(stored).revision == answers[0].revision  # type: ignore[union-attr]


def test_n5_a_forwarded_command_is_authorized_again_by_the_leader() -> None:
    asked: list[str] = []

    def authorize(principal: str, body: Body) -> bool:
        asked.append(principal)
        return principal != "mallory"

    trio = Trio(authorize=authorize)
    leader, follower = trio.leader(), trio.follower()
    before = leader.replica.engine.last_index
    refused = trio.propose(follower, publish("v1"), "k1", principal="mallory")
    assert trio.run(2.0, lambda: bool(refused))
    assert refused[0].code == "forbidden" and asked == ["mallory"]
    assert leader.replica.engine.last_index == before and not trio.labels(leader.name)
    allowed = trio.propose(follower, publish("v1"), "k1", principal="alice")
    assert trio.run(2.0, lambda: bool(allowed))
    assert allowed[0].code == "ok"


def test_n5_a_forwarded_command_that_is_no_command_is_refused_and_not_logged() -> None:
    trio = Trio()
    leader, follower = trio.leader(), trio.follower()
    before = leader.replica.engine.last_index
    replies: list[ForwardReply] = []
    trio.drop = lambda s, r, message: isinstance(message, ForwardReply) and bool(replies.append(message) or True)
    leader.inbox.append(Received(follower.name, Forward((Proposal(7, "k", "me", follower.name, b"\x80\x04pickle"),))))
    trio.run(0.1)
    assert [reply.code for message in replies for reply in message.replies] == ["bad_request"]
    assert leader.replica.engine.last_index == before


def test_n5_what_the_leader_did_not_read_of_a_forwarded_command_does_not_reach_the_log() -> None:
    trio = Trio()
    leader, follower = trio.leader(), trio.follower()
    body = encode_body(publish("v1"))
    trailing = bytes([body[0] + 1]) + body[1:] + b"\x91" * 50 + b"\xc0"
    before = leader.replica.engine.last_index
    leader.inbox.append(Received(follower.name, Forward((Proposal(7, "k", "me", follower.name, trailing),))))
    assert trio.run(2.0, lambda: trio.labels(leader.name) == {"v1"})
    ((_, _, entry),) = leader.journal.entries(before + 1, before + 2, 1 << 20)
    assert body in entry and trailing not in entry


def test_n5_what_nests_deeper_than_the_interpreter_harms_nobody() -> None:
    deep = b"\x91" * 100_000 + b"\xc0"
    trio = Trio()
    leader, follower = trio.leader(), trio.follower()
    body = encode_body(publish("v1"))
    nested = bytes([body[0] + 1]) + body[1:] + deep
    leader.inbox.append(Received(follower.name, Forward((Proposal(7, "k", "me", follower.name, nested),))))
    results = trio.propose(follower, publish("v2"), "k2", timeout_s=30.0)
    first_id = next(iter(follower.replica.proposals.forwarded), 1)
    follower.inbox.append(Received(leader.name, ForwardReply((ProposalReply(first_id, "ok", deep, 1),))))
    follower.inbox.append(Received(leader.name, ForwardReply((ProposalReply(first_id, "no such code", b"", 1),))))
    assert trio.run(2.0, lambda: bool(results))
    with pytest.raises(msgspec.ValidationError, match="nests too deeply"):
        messages.decode(b"\x93\x0c\x05" + deep)
    assert NodeTable(lambda: 0).absorb(deep) is False
