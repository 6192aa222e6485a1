"""Messages that no sound member sends, from a peer with a valid certificate: each is dropped, and nothing of it lasts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raftmeta import codec
from raftmeta.core.state import State
from raftmeta.log import configuration as cfg
from raftmeta.log.configuration import Configuration, MemberSpec
from raftmeta.log.forwarding import MAX_NAMES, MAX_REPLY_BYTES
from raftmeta.log.guard import MAX_NUMBER, MAX_TERMS_MISSED, Rules, is_chunk, is_plausible
from raftmeta.log.messages import (
    MAX_FRAME_BYTES,
    AnyMessage,
    AppendEntries,
    AppendReply,
    Entry,
    Forward,
    ForwardReply,
    PreVoteReply,
    Proposal,
    ProposalReply,
    ReadIndex,
    RequestVote,
    SnapshotChunk,
    SnapshotReply,
    TimeoutNow,
    VoteReply,
    encode,
)
from raftmeta.log.passing import QUIET_S
from raftmeta.log.peers import Received
from raftmeta.log.proposals import MAX_QUEUED, encode_body
from raftmeta.log.setup import LEADER, OP_COMMANDS, OP_MEMBERSHIP
from raftmeta.log.snapshots import SnapshotStore
from tests.support.lone_engine import LoneEngine, entry, trio
from tests.support.memory_disk import MemoryDisk
from tests.support.scripted_member import DATA
from tests.support.trio import Box, Trio, publish

both = pytest.mark.parametrize("on", [True, False], ids=["rule on", "rule off"])
SHA = b"\1" * 32

TERMS: list[Callable[[int], AnyMessage]] = [
    lambda term: VoteReply(term, False),
    lambda term: PreVoteReply(term, 1, False),
    lambda term: AppendReply(term, False, 1, 1),
    lambda term: SnapshotReply(term, 1, 0, False, 1),
    lambda term: RequestVote(term, 1 << 40, 1 << 40, True),
    lambda term: AppendEntries(term, 1, 1, 0, 1, ()),
    lambda term: SnapshotChunk(term, 9, 1, 10, SHA, 0, b"x", 1),
    lambda term: TimeoutNow(term),
]


@both
@pytest.mark.parametrize("make", TERMS, ids=lambda make: type(make(1)).__name__)
def test_a_term_that_no_number_of_elections_explains_is_adopted_from_nobody(make: Callable[[int], AnyMessage], on: bool) -> None:
    lone = LoneEngine(rules=Rules(bound_terms=on), terms=(1, 1))
    lone.step(("m2", make(1 + MAX_TERMS_MISSED + 1)))
    far = lone.engine.term > MAX_TERMS_MISSED
    assert not (on and far)
    assert on or far or isinstance(make(1), TimeoutNow)
    if on:
        assert lone.engine.violations == 1 and lone.sent == []
        for term in (-1, MAX_NUMBER + 1, (1 << 64) - 1):
            lone.step(("m2", make(term)))
        assert lone.engine.term == lone.journal.term == 1


def test_a_member_that_was_away_for_many_elections_follows_and_one_that_starts_with_nothing_follows_any_term() -> None:
    assert is_plausible(1 + MAX_TERMS_MISSED, 1, joining=False)
    assert not is_plausible(2 + MAX_TERMS_MISSED, 1, joining=False)
    assert is_plausible(MAX_NUMBER, 0, joining=True)
    assert not is_plausible(MAX_NUMBER + 1, 0, joining=True)
    lone = LoneEngine(terms=(1,))
    lone.step(("m2", AppendEntries(1_000_000, 1, 1, 0, 1, ())))
    assert lone.engine.term == 1_000_000 and lone.engine.leader_id == "m2"


def membership(*ids: str) -> bytes:
    return bytes([OP_MEMBERSHIP]) + cfg.encode(Configuration(tuple(MemberSpec(name, "z", "", "") for name in ids)))


UNREADABLE = {
    "an opcode of another build": b"\x09x",
    "commands that are none": bytes([OP_COMMANDS]) + b"\xc1",
    "a configuration that is none": bytes([OP_MEMBERSHIP]) + b"garbage",
    "a configuration without members": membership(),
    "a configuration that names a member twice": membership("m1", "m1"),
    "a configuration in another order": membership("m2", "m1"),
    "a member without a name": membership("", "m1"),
    "a member whose vote could not be stored": membership("m1", "m" * 256),
}


@pytest.mark.parametrize("payload", UNREADABLE.values(), ids=UNREADABLE)
def test_an_entry_that_cannot_be_applied_reaches_neither_journal_nor_configuration(payload: bytes) -> None:
    lone = LoneEngine(terms=(1, 1))
    lone.step(("m2", lone.append((2, 1), (entry(3, 2), Entry(4, 2, payload)), term=2)))
    assert lone.terms() == [1, 1] and lone.engine.configuration == trio() and lone.engine.term == 1
    assert lone.engine.violations == 1 and lone.sent == []
    ((peer, detail),) = lone.refusals
    assert peer == "m2" and detail.startswith("entry 4: ")
    lone.step(("m3", lone.append((2, 1), (entry(3, 2),), term=2)))
    assert lone.terms() == [1, 1, 2]


def test_without_the_rule_such_an_entry_is_kept() -> None:
    lone = LoneEngine(rules=Rules(read_before_append=False), terms=(1, 1))
    lone.step(("m2", lone.append((2, 1), (Entry(3, 2, b"\x09x"),), term=2)))
    assert lone.terms() == [1, 1, 2]


def test_what_followers_refuse_is_alarmed_and_a_restart_of_its_leader_ends_it() -> None:
    box_trio = Trio()
    leader = box_trio.leader()
    leader.replica.engine._append(b"\x63 from the future")
    box_trio.run(1.0)
    followers = [box for box in box_trio.boxes.values() if box is not leader]
    assert all("alarm leader_refused" in box.told for box in followers)
    box_trio.boot(leader.name, box_trio.stop(leader.name))
    assert box_trio.write(box_trio.leader(), "v1").code == "ok"
    box_trio.run(QUIET_S + 1.0)
    assert all("alarm over leader_refused" in box.told for box in followers)
    assert all(box_trio.labels(name) == {"v1"} for name in box_trio.boxes)


def test_a_second_leader_of_one_term_is_not_followed_and_ends_nobody() -> None:
    lone = LoneEngine()
    lone.elect()
    term = lone.engine.term
    lone.step(("m2", lone.append((0, 0), term=term)))
    lone.step(("m2", SnapshotChunk(term, 900, 1, 10, SHA, 0, b"x", 1)))
    assert lone.engine.role == LEADER and lone.engine.leader_id == "m1" and lone.engine.violations == 2


def test_an_answer_to_a_round_that_was_not_sent_yet_confirms_no_read() -> None:
    lone = LoneEngine(configuration=trio("m1", "m2", "m3"))
    lone.elect()
    before = lone.engine.confirmed_round
    for reply in (AppendReply(lone.engine.term, True, 1, 1 << 60), SnapshotReply(lone.engine.term, 1, 0, False, 1 << 60)):
        lone.step(("m2", reply))
    assert lone.engine.confirmed_round <= before and lone.engine.violations == 2


@pytest.mark.parametrize(
    "change",
    [
        {"index": 0}, {"index": -1}, {"index": MAX_NUMBER + 1}, {"index_term": -1}, {"index_term": 8}, {"size_bytes": 0},
        {"size_bytes": -1}, {"sha256": b""}, {"offset": -1}, {"offset": 11}, {"data": bytes((1 << 20) + 1)}, {"round": -1},
    ],
    ids=str,
)  # fmt: skip
def test_a_part_of_a_snapshot_that_no_leader_can_have_is_dropped(change: dict[str, object]) -> None:
    fields = {"term": 7, "index": 9, "index_term": 7, "size_bytes": 10, "sha256": SHA, "offset": 0, "data": b"x", "round": 1}
    assert is_chunk(SnapshotChunk(**fields))  # type: ignore[arg-type]
    assert not is_chunk(SnapshotChunk(**{**fields, **change}))  # type: ignore[arg-type]


def sent_snapshot(box: Box, config: bytes, term: int, index_term: int) -> None:
    """A whole snapshot, sound but for its configuration or its term, in one chunk."""
    disk = MemoryDisk(1)
    store = SnapshotStore(disk, DATA / "s", "trio")
    meta = store.write(box.replica.engine.applied_index + 100, index_term, config, codec.snapshot_chunks(State.empty()))
    data = store.read_chunk(meta, 0, 1 << 20)
    chunk = SnapshotChunk(term, meta.index, meta.term, meta.size_bytes, meta.sha256, 0, data, 1)
    box.inbox.append(Received(box.replica.engine.leader_id, chunk))


@pytest.mark.parametrize(
    ("config", "ahead"),
    [(b"garbage", 0), (cfg.encode(Configuration(())), 0), (cfg.encode(trio()), 9)],
    ids=["garbage", "no members", "of a later term than its leader's"],
)
def test_a_snapshot_that_no_start_could_go_on_from_is_never_published(config: bytes, ahead: int) -> None:
    box_trio = Trio()
    leader, follower = box_trio.leader(), box_trio.follower()
    box_trio.write(leader, "v1")
    box_trio.run(0.5)
    before = follower.replica.state
    term = leader.replica.engine.term
    sent_snapshot(follower, config, term, term + ahead)
    box_trio.run(0.2)
    assert not [name for name in follower.disk.listdir(DATA / "snapshots") if name.startswith("snapshot-")]
    assert follower.replica.state is before
    assert box_trio.write(leader, "v2").code == "ok"


def answers(box_trio: Trio, leader: Box, forward: Forward) -> list[ForwardReply]:
    replies: list[ForwardReply] = []

    def catch(sender: str, receiver: str, message: AnyMessage) -> bool:
        if isinstance(message, ForwardReply):
            replies.append(message)
        return isinstance(message, ForwardReply)

    box_trio.drop = catch
    leader.inbox.append(Received(box_trio.follower().name, forward))
    box_trio.run(0.5)
    return replies


def test_answers_to_many_forwarded_commands_leave_in_several_messages() -> None:
    box_trio = Trio()
    leader = box_trio.leader()
    replies = answers(box_trio, leader, Forward(tuple(Proposal(number, "", "", "", b"") for number in range(MAX_QUEUED))))
    assert sum(len(reply.replies) for reply in replies) == MAX_QUEUED
    assert all(len(encode(reply)) <= MAX_FRAME_BYTES for reply in replies)
    large = bytes(1 << 20)
    leader.replica._forwarding._replies["m2"] = [ProposalReply(number, "ok", large, 1) for number in range(20)]
    leader.replica._forwarding.flush()
    sent = [message for _, message in leader.replica._outbox if isinstance(message, ForwardReply)]
    assert [reply.id for message in sent for reply in message.replies] == list(range(20))
    assert all(len(encode(message)) <= MAX_REPLY_BYTES for message in sent)


def test_more_forwarded_commands_than_a_member_can_hold_are_not_looked_at() -> None:
    box_trio = Trio()
    assert answers(box_trio, box_trio.leader(), Forward((Proposal(1, "", "", "", b""),) * (MAX_QUEUED + 1))) == []


def test_a_forwarded_command_with_an_endless_key_is_refused_and_not_logged() -> None:
    box_trio = Trio()
    leader = box_trio.leader()
    before = leader.replica.engine.last_index
    (reply,) = answers(box_trio, leader, Forward((Proposal(1, "k" * (MAX_NAMES + 1), "me", "m2", encode_body(publish("v"))),)))
    assert [answer.code for answer in reply.replies] == ["bad_request"]
    assert leader.replica.engine.last_index == before


def test_what_is_no_message_of_the_log_is_dropped() -> None:
    lone = LoneEngine(terms=(1,))
    lone.step(("m2", ReadIndex(1)))
    assert lone.engine.violations == 1
