"""The bytes that members exchange are a promise to members of other releases: changing one takes a line in the CHANGELOG.

Each message type, the hello and the keepalive stand here with their bytes, and these bytes are read back.
"""

from __future__ import annotations

from typing import get_args

import pytest

from raftmeta.log import frames, hello
from raftmeta.log import messages as m
from raftmeta.log.connection import SendQueue
from raftmeta.log.hello import Hello

GOLDEN: list[tuple[m.AnyMessage, str]] = [
    (
        m.AppendEntries(
            term=7,
            prev_index=300,
            prev_term=6,
            commit_index=299,
            round=70_000,
            entries=(m.Entry(index=301, term=7, payload=b"\x00abc"), m.Entry(index=302, term=7, payload=b"\x01")),
        ),
        "970107cd012c06cd012bce000111709293cd012d07c4040061626393cd012e07c40101",
    ),
    (m.AppendReply(term=7, matched=True, next_index=303, round=70_000), "960207c3cd012fce00011170c3"),
    (m.RequestVote(term=8, last_index=302, last_term=7, transfer=False), "950308cd012e07c2"),
    (m.VoteReply(term=8, granted=True), "930408c3"),
    (m.PreVote(term=7, last_index=302, last_term=7), "940507cd012e07"),
    (m.PreVoteReply(term=7, asked_term=7, granted=False, empty=True), "95060707c2c3"),
    (
        m.SnapshotChunk(term=7, index=200, index_term=5, size_bytes=1 << 20, sha256=bytes(range(32)), offset=65_536, data=b"data", round=9),
        "990707ccc805ce00100000c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fce00010000c4046461746109",
    ),
    (m.SnapshotReply(term=7, index=200, next_offset=65_540, installed=False, round=9), "960807ccc8ce00010004c209"),
    (m.TimeoutNow(term=7), "920907"),
    (
        m.Forward(proposals=(m.Proposal(id=1, request_id="k1", principal="alice", source="b", body=b"\x93\x03\xa1m\xa1v"),)),
        "920a919501a26b31a5616c696365a162c4069303a16da176",
    ),
    (m.ForwardReply(replies=(m.ProposalReply(id=1, code="ok", outcome=b"\x90", index=303),)), "920b919401a26f6bc40190cd012f"),
    (m.ReadIndex(id=1 << 40), "920ccf0000010000000000"),
    (m.ReadIndexReply(id=1 << 40, index=-1), "930dcf0000010000000000ff"),
    (m.Gossip(topic="heartbeat", data=b"{}"), "930ea9686561727462656174c4027b7d"),
    (m.StateReport(revision=12, state_hash=bytes(32)), "940f0cc420" + "00" * 32 + "c3"),
]

GOLDEN_HELLO = (
    Hello(
        protocol=1,
        cluster_id="rm-0123456789abcdef",
        member_id="a",
        incarnation=(1 << 64) - 1,
        feature=1,
        dial=3,
        seen_incarnation=1 << 63,
        seen_dial=2,
    ),
    "996401b3726d2d30313233343536373839616263646566a161cfffffffffffffffff0103cf800000000000000002",
)


@pytest.mark.parametrize(("message", "expected"), GOLDEN, ids=[type(message).__name__ for message, _ in GOLDEN])
def test_each_message_has_its_golden_bytes_and_reads_back(message: m.AnyMessage, expected: str) -> None:
    assert m.encode(message).hex() == expected
    assert m.decode(bytes.fromhex(expected)) == message


def test_every_message_of_the_schema_stands_in_the_golden_list() -> None:
    assert {type(message) for message, _ in GOLDEN} == set(get_args(m.AnyMessage))


def test_the_hello_has_its_golden_bytes_and_reads_back() -> None:
    value, expected = GOLDEN_HELLO
    assert hello.encode(value).hex() == expected
    assert hello.decode(bytes.fromhex(expected)) == value


def test_no_message_carries_the_tag_of_the_hello() -> None:
    tags = {kind.__struct_config__.tag for kind in get_args(m.AnyMessage)}
    assert hello.HELLO_TAG not in tags
    assert len(tags) == len(GOLDEN)


def test_a_frame_is_a_little_endian_length_and_the_message() -> None:
    queue = SendQueue()
    queue.push(m.encode(m.TimeoutNow(term=7)))
    queue.push(b"")
    assert bytes(queue.head()).hex() == "03000000" + "920907" + "00000000"
    assert frames.KEEPALIVE.hex() == "00000000"


def test_the_limits_of_the_wire_are_part_of_the_promise() -> None:
    assert (hello.PROTOCOL, hello.MAX_HELLO_BYTES, m.MAX_FRAME_BYTES) == (1, 65_536, 16_777_216)
    assert (m.MAX_COMMAND_BYTES, m.MAX_ENTRY_BYTES, m.MAX_CHUNK_BYTES, m.MAX_GOSSIP_BYTES) == (4 << 20, 8 << 20, 1 << 20, 64 << 10)
