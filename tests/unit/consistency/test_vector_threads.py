"""Several threads, and a few blocks at a time, give what one pass over everything gives."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency import vector
from consistency.vector import BLOCK_BYTES
from consistency.vector_threads import LEAST_BLOCKS, threaded
from raftmeta.core.errors import RaftmetaError
from tests.support import wcv_reference


def noise(size: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(0, 9 * BLOCK_BYTES + 20),
    threads=st.integers(1, 7),
    least=st.integers(1, 4),
    name=st.sampled_from(["numpy", "numba", "torch"]),
)
def test_any_number_of_threads_gives_the_blocks_of_the_reference(size: int, threads: int, least: int, name: str) -> None:
    data = noise(size)
    with threaded(threads, vector.backend(name), least) as shared:
        found = vector.tensor_entry(data, "U8", (size,), shared)
    assert [tuple(pair) for pair in found.blocks.tolist()] == wcv_reference.blocks(data)
    assert found.entry == vector.tensor_entry(data, "U8", (size,), vector.backend("numpy")).entry


@pytest.mark.parametrize("threads", [2, 3])
def test_pieces_of_any_size_go_through_several_threads(threads: int) -> None:
    data = memoryview(noise(3 * LEAST_BLOCKS * BLOCK_BYTES + 77))
    with threaded(threads) as shared:
        made = vector.BlockVector(shared)
        for begin in range(0, len(data), 1_300_001):
            made.update(data[begin : begin + 1_300_001])
        found = made.finish("U8", (len(data),))
    assert found.entry == vector.tensor_entry(data, "U8", (len(data),)).entry


def test_the_work_is_shared_and_the_caller_takes_a_part() -> None:
    seen: list[int] = []
    plain = vector.backend("numpy")

    def kernel(words: Any, native: Any, swapped: Any, out: Any) -> None:
        seen.append(threading.get_ident())
        plain.kernel(words, native, swapped, out)

    data = noise(4 * LEAST_BLOCKS * BLOCK_BYTES)
    with threaded(4, vector.Backend("watched", kernel)) as shared:
        seen.clear()
        vector.block_checks(data, shared)
        assert len(seen) == 4 and threading.get_ident() in seen and len(set(seen)) > 1
        seen.clear()
        vector.block_checks(data[: LEAST_BLOCKS * BLOCK_BYTES], shared)
        assert seen == [threading.get_ident()], "little work is not handed over"


def test_a_kernel_that_fails_on_one_thread_fails_the_call_after_all_have_ended() -> None:
    running: list[int] = []
    plain = vector.backend("numpy")

    def kernel(words: Any, native: Any, swapped: Any, out: Any) -> None:
        running.append(1)
        try:
            if broken and not np.any(words):
                raise ArithmeticError("unwell")
            plain.kernel(words, native, swapped, out)
        finally:
            running.pop()

    broken = False
    data = bytearray(noise(4 * LEAST_BLOCKS * BLOCK_BYTES))
    with threaded(4, vector.Backend("unwell", kernel)) as shared:
        broken = True
        for part in range(4):
            damaged = bytearray(data)
            damaged[part * LEAST_BLOCKS * BLOCK_BYTES : (part + 1) * LEAST_BLOCKS * BLOCK_BYTES] = bytes(LEAST_BLOCKS * BLOCK_BYTES)
            with pytest.raises(ArithmeticError):
                vector.block_checks(damaged, shared)
            assert running == []


def test_a_kernel_that_is_wrong_on_other_threads_is_refused_before_it_is_used() -> None:
    plain, main = vector.backend("numpy"), threading.get_ident()

    def kernel(words: Any, native: Any, swapped: Any, out: Any) -> None:
        plain.kernel(words, native, swapped, out)
        if threading.get_ident() != main:
            out[0, 0] += np.uint64(1)

    with pytest.raises(RaftmetaError, match="'mixed on 2 threads' fails its check"), threaded(2, vector.Backend("mixed", kernel)):
        pass


@pytest.mark.parametrize("threads", [0, -1, 257])
def test_an_impossible_number_of_threads_is_refused(threads: int) -> None:
    with pytest.raises(RaftmetaError, match="1 to 256 threads") as caught, threaded(threads):
        pass
    assert caught.value.code == "bad_field"


@pytest.fixture
def unswitched() -> Iterator[None]:
    """The interpreter takes the lock from no thread; who wants it waits until it is let go."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1_000)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("name", ["numba", "numpy"])
def test_the_kernel_lets_other_threads_run(name: str, unswitched: None) -> None:
    plain, inside = vector.backend(name), [False]
    data = np.ones(64 << 20, np.uint8)

    def kernel(words: Any, native: Any, swapped: Any, out: Any) -> None:
        inside[0] = True
        plain.kernel(words, native, swapped, out)
        inside[0] = False

    def seen_at_work() -> bool:
        begun = threading.Event()

        def work() -> None:
            begun.set()
            vector.block_checks(data, vector.Backend("watched", kernel))

        worker = threading.Thread(target=work)
        worker.start()
        begun.wait()
        while worker.is_alive():
            if inside[0]:
                worker.join()
                return True
            worker.join(0.001)
        return False

    assert any(seen_at_work() for _ in range(50)), "no other thread ran while the kernel did"


# A few blocks at a time.


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 5 * BLOCK_BYTES + 20), data=st.data())
def test_checks_follow_what_was_written_into_a_tensor(size: int, data: st.DataObject) -> None:
    tensor = bytearray(noise(size))
    checks = vector.block_checks(tensor)
    before = checks.copy()
    changed: set[int] = set()
    for _ in range(data.draw(st.integers(0, 3))):
        begin = data.draw(st.integers(0, size))
        end = data.draw(st.integers(begin, min(size, begin + 2 * BLOCK_BYTES)))
        tensor[begin:end] = noise(end - begin, seed=begin + 2)
        changed.update(vector.blocks_within(begin, end))
    found = vector.update_blocks(tensor, checks, changed)
    whole = vector.tensor_entry(tensor, "U8", (size,))
    assert np.array_equal(found, whole.blocks)
    assert vector.entry_of("U8", (size,), size, found) == whole.entry
    assert np.array_equal(checks, before), "what was given is left as it is"


def test_only_the_named_blocks_are_read() -> None:
    tensor = bytearray(noise(3 * BLOCK_BYTES))
    checks = vector.block_checks(tensor)
    tensor[0] ^= 1
    tensor[-1] ^= 1
    found = vector.update_blocks(tensor, checks, [2])
    assert np.array_equal(found[:2], checks[:2])
    assert np.array_equal(found[2], vector.block_checks(tensor)[2])


@pytest.mark.parametrize(
    ("begin", "end", "blocks"), [(0, 0, []), (5, 5, []), (0, 1, [0]), (65_535, 65_537, [0, 1]), (65_536, 131_072, [1])]
)
def test_bytes_lie_in_their_blocks(begin: int, end: int, blocks: list[int]) -> None:
    assert list(vector.blocks_within(begin, end)) == blocks


def test_blocks_and_checks_that_the_tensor_does_not_have_are_refused() -> None:
    tensor = noise(2 * BLOCK_BYTES)
    checks = vector.block_checks(tensor)
    for number in (-1, 2):
        with pytest.raises(RaftmetaError, match=rf"blocks 0\.\.1, found {number}") as caught:
            vector.update_blocks(tensor, checks, [number])
        assert caught.value.code == "bad_field"
    with pytest.raises(RaftmetaError, match=r"shape \(2, 2\), found \(1, 2\)"):
        vector.update_blocks(tensor, checks[:1], [0])
