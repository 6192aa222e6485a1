"""The vector of bytes that lie in a tensor: the checks of the other backends bit for bit, within its bound of memory, or not at all."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from consistency import vector, vector_torch  # noqa: E402
from consistency.vector import BLOCK_BYTES  # noqa: E402
from raftmeta.core.errors import RaftmetaError  # noqa: E402
from tests.support import wcv_reference  # noqa: E402

pytestmark = pytest.mark.device
EDGES = [
    0,
    1,
    7,
    8,
    9,
    BLOCK_BYTES - 8,
    BLOCK_BYTES - 1,
    BLOCK_BYTES,
    BLOCK_BYTES + 1,
    BLOCK_BYTES + 8,
    3 * BLOCK_BYTES,
    3 * BLOCK_BYTES + 13,
]


def noise(size: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("length", EDGES)
def test_bytes_in_a_tensor_have_the_blocks_of_the_reference(length: int) -> None:
    data = noise(length)
    assert [tuple(pair) for pair in vector_torch.block_checks(torch.from_numpy(data)).tolist()] == wcv_reference.blocks(data.tobytes())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 6 * BLOCK_BYTES + 17), st.integers(0, 2**31), st.lists(st.integers(1, 6), max_size=5), st.sampled_from([0, 8, 256, 4096])
)
def test_any_cut_into_whole_blocks_gives_what_numpy_and_numba_give(length: int, seed: int, cuts: list[int], offset: int) -> None:
    data = noise(offset + length, seed)
    there, here = torch.from_numpy(data)[offset:], data[offset:]
    edges = sorted({0, length, *(cut * BLOCK_BYTES for cut in cuts if cut * BLOCK_BYTES < length)})
    parts = [vector_torch.block_checks(there[begin:end]) for begin, end in itertools.pairwise(edges)]
    found = np.concatenate([np.zeros((0, 2), np.uint64), *parts])
    for name in ("numpy", "numba"):
        assert np.array_equal(found, vector.block_checks(here, vector.backend(name)))


def test_words_of_all_ones_wrap_around_as_unsigned_numbers_do() -> None:
    data = np.full(2 * BLOCK_BYTES + 5, 0xFF, np.uint8)
    assert np.array_equal(vector_torch.block_checks(torch.from_numpy(data)), vector.block_checks(data, vector.backend("numpy")))


class Living(TorchDispatchMode):  # type: ignore[misc]
    """The most memory that tensors made within it took at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {item.untyped_storage().data_ptr() for item in (*args, *(kwargs or {}).values()) if isinstance(item, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given | set(self._seen):
            storage = made.untyped_storage()
            self._seen[storage.data_ptr()] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, storage.data_ptr())
        return made

    def _gone(self, address: int) -> None:
        self.now -= self._seen.pop(address, 0)


@pytest.mark.parametrize("size", [3 * vector_torch.PIECE_BYTES + 100, 9 * vector_torch.PIECE_BYTES])
def test_the_extra_memory_stays_below_its_bound_however_large_the_tensor(size: int) -> None:
    data = torch.zeros(size, dtype=torch.uint8)
    with Living() as living:
        vector_torch.block_checks(data)
    assert 0 < living.most <= vector_torch.EXTRA_BYTES
    assert living.most >= vector_torch.PIECE_BYTES, "it saw the products of a piece"


def test_a_tensor_of_more_than_a_piece_has_the_same_checks() -> None:
    data = noise(vector_torch.PIECE_BYTES + 3 * BLOCK_BYTES + 1)
    assert np.array_equal(vector_torch.block_checks(torch.from_numpy(data)), vector.block_checks(data))
    assert np.array_equal(vector.block_checks(data, vector.backend("torch")), vector.block_checks(data))


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(16),
        torch.zeros((2, 8), dtype=torch.uint8),
        torch.zeros(32, dtype=torch.uint8)[::2],
        torch.zeros(32, dtype=torch.uint8)[1:],
    ],
)
def test_what_is_no_flat_aligned_bytes_is_refused(wrong: Any) -> None:
    with pytest.raises(RaftmetaError, match="flat bytes at a multiple of 8") as caught:
        vector_torch.block_checks(wrong)
    assert caught.value.code == "bad_field"


def test_a_device_that_answers_the_stored_vectors_is_taken() -> None:
    vector_torch.require(torch.device("cpu"))


@pytest.mark.parametrize("lane", [0, 1])
def test_a_device_that_saturates_instead_of_wrapping_is_refused(lane: int) -> None:
    def saturating(data: Any) -> vector.Words:
        found = vector_torch.block_checks(data).view(np.int64)
        found[:, lane] = np.maximum(found[:, lane], 0)
        return found.view(np.uint64)

    with pytest.raises(RaftmetaError, match="fails its check over") as caught:
        vector_torch.require(torch.device("cpu"), saturating)
    assert caught.value.code == "integrity"
