"""Frames come out of a byte stream whole, in order and bounded, however the bytes arrive."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmeta.log import frames
from raftmeta.log.connection import JOIN_BYTES, SendQueue
from raftmeta.log.frames import FrameReader, FrameTooLarge

LIMIT = 1 << 20
SIZES = st.one_of(st.integers(0, 40), st.integers(16_000, 17_000), st.integers(250_000, 300_000))


def feed(reader: FrameReader, data: bytes, steps: list[int]) -> list[bytes]:
    """Give the data in pieces of at most these sizes, over and over, and take frames after each."""
    taken: list[bytes] = []
    turn = 0
    while data:
        view = reader.space()
        count = min(len(view), len(data), steps[turn % len(steps)])
        assert count > 0
        view[:count] = data[:count]
        reader.received(count)
        data = data[count:]
        turn += 1
        while (frame := reader.next_frame()) is not None:
            taken.append(bytes(frame))
    return taken


@given(st.lists(SIZES, max_size=6), st.lists(st.integers(1, 70_000), min_size=1, max_size=4), st.booleans())
def test_frames_are_the_same_however_the_bytes_arrive(sizes: list[int], steps: list[int], authenticated: bool) -> None:
    payloads = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    reader = FrameReader(LIMIT)
    if authenticated:
        reader.raise_limit(LIMIT)
    steps = steps if sum(sizes) < 50_000 else [step + 4096 for step in steps]
    assert feed(reader, b"".join(struct.pack("<I", len(p)) + p for p in payloads), steps) == payloads


@pytest.mark.parametrize("length", [LIMIT + 1, 0xFFFFFFFF])
def test_a_length_above_the_limit_is_refused_before_its_bytes_arrive(length: int) -> None:
    reader = FrameReader(LIMIT)
    with pytest.raises(FrameTooLarge, match=f"{length} bytes, limit {LIMIT}"):
        feed(reader, struct.pack("<I", length), [4])


def test_a_frame_of_exactly_the_limit_is_taken() -> None:
    assert len(feed(FrameReader(LIMIT), struct.pack("<I", LIMIT) + bytes(LIMIT), [1 << 18])[0]) == LIMIT


def test_the_buffer_of_a_large_frame_is_given_back() -> None:
    reader = FrameReader(LIMIT)
    reader.raise_limit(LIMIT)
    feed(reader, struct.pack("<I", LIMIT) + bytes(LIMIT), [1 << 18])
    assert len(reader.space()) == frames.READ_BYTES


def test_an_unauthenticated_reader_holds_no_more_than_one_small_frame() -> None:
    assert len(FrameReader(64 << 10).space()) == frames.START_BYTES


@given(st.lists(st.integers(0, 2 * JOIN_BYTES), max_size=8), st.lists(st.integers(1, 50_000), min_size=1, max_size=5))
def test_the_send_queue_gives_back_its_frames_in_order_whatever_the_socket_takes(sizes: list[int], steps: list[int]) -> None:
    queue = SendQueue()
    expected = b""
    for number, size in enumerate(sizes):
        payload = bytes([number]) * size
        queue.push(payload)
        expected += struct.pack("<I", size) + payload
    assert queue.size == len(expected)
    written = b""
    turn = 0
    while queue.size:
        head = queue.head()
        assert bytes(head) == bytes(queue.head()), "a write that must be repeated gets the same bytes"
        count = min(len(head), steps[turn % len(steps)] + 1000)
        written += bytes(head[:count])
        queue.written(count)
        turn += 1
    assert written == expected


def test_small_frames_are_joined_into_one_write() -> None:
    queue = SendQueue()
    for number in range(100):
        queue.push(bytes([number]) * 50)
    assert len(queue.head()) == 100 * 54


def test_a_keepalive_is_a_frame_of_length_zero() -> None:
    queue = SendQueue()
    queue.push(b"")
    assert bytes(queue.head()) == frames.KEEPALIVE
