"""What the vector must catch: damage of the kinds that copies, shards, buses and careless kernels do, in every dtype.

The same table runs against planted variants that leave out one part of the definition. They must let damage through, which shows that the
table can see the difference, and the check at first use must refuse them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from consistency import vector, vector_numpy
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import DTYPE_BITS

Bytes = NDArray[np.uint8]
Rng = np.random.Generator
BLOCK = vector.BLOCK_BYTES
SIZE = 3 * BLOCK + 4_096  # three whole blocks and a short one
TRIALS = 6
FLOATS = {"F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64", "C64"}


def weights(dtype: str, rng: Rng) -> Bytes:
    """Values as weights have them: centred floats of small spread, small integers, flags."""
    count = SIZE * 8 // DTYPE_BITS[dtype]
    if dtype in ("F16", "F32", "F64"):
        return rng.normal(0, 0.05, count).astype(f"<f{DTYPE_BITS[dtype] // 8}").view(np.uint8)
    if dtype == "C64":
        return rng.normal(0, 0.05, 2 * count).astype("<f4").view(np.uint8)
    if dtype == "BF16":
        return (rng.normal(0, 0.05, count).astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8)
    if dtype == "BOOL":
        return rng.integers(0, 2, count, dtype=np.uint8)
    return rng.integers(0, 100, count).astype(f"<u{DTYPE_BITS[dtype] // 8}").view(np.uint8)


def elements(data: Bytes, dtype: str) -> NDArray[Any]:
    """A writable view with one unsigned number for each element (for each component of a complex one)."""
    width = 4 if dtype == "C64" else DTYPE_BITS[dtype] // 8
    return data.view(f"<u{width}")


def words(data: Bytes) -> NDArray[np.uint64]:
    return data.view("<u8")


# Each damage changes `data` in place.


def flip_two_signs(data: Bytes, dtype: str, rng: Rng) -> None:
    cells = elements(data, dtype)
    top = cells.dtype.type(1 << (8 * cells.dtype.itemsize - 1))
    cells[rng.choice(cells.size, 2, replace=False)] ^= top


def flip_two_signs_at_the_top_of_words(data: Bytes, dtype: str, rng: Rng) -> None:
    cells = words(data)
    cells[rng.choice(8_192, 2, replace=False) + BLOCK // 8] ^= np.uint64(1 << 63)


def negate(data: Bytes, dtype: str, rng: Rng) -> None:
    cells = elements(data, dtype)
    if dtype in FLOATS:
        cells ^= cells.dtype.type(1 << (8 * cells.dtype.itemsize - 1))
    elif dtype == "BOOL":
        cells ^= cells.dtype.type(1)
    else:
        cells[:] = (~cells) + cells.dtype.type(1)


def conjugate(data: Bytes, dtype: str, rng: Rng) -> None:
    """The sign of every second number, which in a complex tensor is the imaginary part."""
    cells = elements(data, dtype)[1::2]
    cells ^= cells.dtype.type(1 << (8 * cells.dtype.itemsize - 1))


def transpose(data: Bytes, dtype: str, rng: Rng) -> None:
    cells = data.view(f"<u{DTYPE_BITS[dtype] // 8}")
    cells[:] = cells.reshape(64, -1).T.ravel()


def transpose_a_square(data: Bytes, dtype: str, rng: Rng) -> None:
    cells = data.view(f"<u{DTYPE_BITS[dtype] // 8}")
    side = int(rng.integers(2, 128))
    square = cells[: side * side].reshape(side, side)
    square[:] = square.T.copy()


def swap_words(data: Bytes, dtype: str, rng: Rng) -> None:
    cells = words(data)
    one, two = rng.choice(cells.size, 2, replace=False)
    cells[[one, two]] = cells[[two, one]]


def swap_neighbour_words(data: Bytes, dtype: str, rng: Rng) -> None:
    cells = words(data)
    one = int(rng.integers(0, cells.size - 1))
    cells[[one, one + 1]] = cells[[one + 1, one]]


def swap_blocks(data: Bytes, dtype: str, rng: Rng) -> None:
    one, two = rng.choice(3, 2, replace=False)
    blocks = data[: 3 * BLOCK].reshape(3, BLOCK)
    blocks[[one, two]] = blocks[[two, one]]


def reverse_bytes_of_elements(data: Bytes, dtype: str, rng: Rng) -> None:
    cells = elements(data, dtype)
    cells[:] = cells.byteswap() if cells.dtype.itemsize > 1 else cells[::-1]


def shift_by_a_byte(data: Bytes, dtype: str, rng: Rng) -> None:
    data[1:] = data[:-1].copy()


def shift_by_a_word(data: Bytes, dtype: str, rng: Rng) -> None:
    data[:-8] = data[8:].copy()


def rotate_by_a_page(data: Bytes, dtype: str, rng: Rng) -> None:
    data[:] = np.roll(data, 4_096)


def rotate_by_a_block(data: Bytes, dtype: str, rng: Rng) -> None:
    data[: 3 * BLOCK] = np.roll(data[: 3 * BLOCK], BLOCK)


def zero_a_word(data: Bytes, dtype: str, rng: Rng) -> None:
    words(data)[rng.integers(0, SIZE // 8)] = 0


def zero_a_page(data: Bytes, dtype: str, rng: Rng) -> None:
    at = int(rng.integers(0, SIZE // 4_096)) * 4_096
    data[at : at + 4_096] = 0


def zero_a_block(data: Bytes, dtype: str, rng: Rng) -> None:
    at = int(rng.integers(0, 3)) * BLOCK
    data[at : at + BLOCK] = 0


def zero_the_tail(data: Bytes, dtype: str, rng: Rng) -> None:
    data[3 * BLOCK :] = 0


def zero_everything(data: Bytes, dtype: str, rng: Rng) -> None:
    data[:] = 0


def drop_a_block(data: Bytes, dtype: str, rng: Rng) -> None:
    at = int(rng.integers(0, 3)) * BLOCK
    data[at : SIZE - BLOCK] = data[at + BLOCK :].copy()
    data[SIZE - BLOCK :] = 0


def repeat_a_block(data: Bytes, dtype: str, rng: Rng) -> None:
    one, two = rng.choice(3, 2, replace=False)
    blocks = data[: 3 * BLOCK].reshape(3, BLOCK)
    blocks[one] = blocks[two]


def stick(bit: int, level: int) -> Callable[[Bytes, str, Rng], None]:
    def damage(data: Bytes, dtype: str, rng: Rng) -> None:
        cells = words(data)
        if level:
            cells |= np.uint64(1 << bit)
        else:
            cells &= np.uint64(~(1 << bit) & (1 << 64) - 1)

    damage.__name__ = f"bit {bit} stuck at {level}"
    return damage


DAMAGES: list[Callable[[Bytes, str, Rng], None]] = [
    flip_two_signs,
    flip_two_signs_at_the_top_of_words,
    negate,
    conjugate,
    transpose,
    transpose_a_square,
    swap_words,
    swap_neighbour_words,
    swap_blocks,
    reverse_bytes_of_elements,
    shift_by_a_byte,
    shift_by_a_word,
    rotate_by_a_page,
    rotate_by_a_block,
    zero_a_word,
    zero_a_page,
    zero_a_block,
    zero_the_tail,
    zero_everything,
    drop_a_block,
    repeat_a_block,
]
STUCK = [stick(bit, level) for bit in range(64) for level in (0, 1)]


def escapes(using: vector.Backend, dtype: str, damages: list[Callable[[Bytes, str, Rng], None]], trials: int) -> Iterator[str]:
    """The damages that changed the bytes of a tensor but not its entry."""
    rng = np.random.default_rng(2024)
    for damage in damages:
        for _ in range(trials):
            healthy = weights(dtype, rng)
            broken = healthy.copy()
            damage(broken, dtype, rng)
            if not np.array_equal(healthy, broken) and _entry(healthy, using) == _entry(broken, using):
                yield damage.__name__


def _entry(data: Bytes, using: vector.Backend) -> str:
    return vector.tensor_entry(data, "U8", (data.size,), using).entry


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_no_structured_damage_escapes(dtype: str) -> None:
    assert list(escapes(vector.backend(), dtype, DAMAGES, TRIALS)) == []


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_no_stuck_bit_line_escapes(dtype: str) -> None:
    assert list(escapes(vector.backend(), dtype, STUCK, 1)) == []


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_equal_shape_tensors_that_change_places_change_the_root(dtype: str) -> None:
    rng, shape = np.random.default_rng(5), (SIZE * 8 // DTYPE_BITS[dtype],)
    one, two = (vector.tensor_entry(weights(dtype, rng), dtype, shape).entry for _ in range(2))
    assert vector.root({"query": one, "key": two}) != vector.root({"query": two, "key": one})


@settings(max_examples=200, deadline=None)
@given(
    position=st.integers(0, SIZE // 8 - 1),
    change=st.integers(1, (1 << 64) - 1),
    name=st.sampled_from(["numpy", "numba", "torch"]),
)
def test_any_change_inside_one_word_is_seen_by_each_lane(position: int, change: int, name: str) -> None:
    healthy = weights("F32", np.random.default_rng(7))
    broken = healthy.copy()
    words(broken)[position] ^= np.uint64(change)
    before, after = (vector.block_checks(data, vector.backend(name)) for data in (healthy, broken))
    differs = before != after
    assert differs[position // 8_192].tolist() == [True, True]
    assert int(differs.sum()) == 2, "the block that differs is named, and no other"


# Planted variants.


def without_swap(words: Any, native_keys: Any, swapped_keys: Any, out: Any) -> None:
    vector_numpy.block_sums(words, native_keys, swapped_keys, out)
    other = np.empty_like(out)
    vector_numpy.block_sums(words, swapped_keys, native_keys, other)
    out[:, 1] = other[:, 0]


def with_one_key(words: Any, native_keys: Any, swapped_keys: Any, out: Any) -> None:
    vector_numpy.block_sums(words, np.full_like(native_keys, native_keys[0]), np.full_like(swapped_keys, swapped_keys[0]), out)


def without_the_last_block(words: Any, native_keys: Any, swapped_keys: Any, out: Any) -> None:
    vector_numpy.block_sums(words, native_keys, swapped_keys, out)
    if out.shape[0] > 1:
        out[-1] = 0


PLANTED = {
    "without_swap": (without_swap, "F64", {"flip_two_signs", "flip_two_signs_at_the_top_of_words", "negate", "conjugate"}),
    "with_one_key": (with_one_key, "F32", {"swap_neighbour_words", "flip_two_signs_at_the_top_of_words"}),
    "without_the_last_block": (without_the_last_block, "F32", {"zero_the_tail"}),
}


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_a_variant_that_leaves_a_part_out_lets_damage_through_and_is_refused(name: str) -> None:
    kernel, dtype, expected = PLANTED[name]
    variant = vector.Backend(name, kernel)
    assert expected <= set(escapes(variant, dtype, DAMAGES, TRIALS))
    with pytest.raises(RaftmetaError, match=f"backend '{name}' fails its check") as caught:
        vector.self_check(variant)
    assert caught.value.code == "integrity"


def test_a_stuck_top_line_escapes_without_the_swapped_lane() -> None:
    variant = vector.Backend("without_swap", without_swap)
    assert any("bit 63" in escaped for dtype in ("F32", "F64", "I8") for escaped in escapes(variant, dtype, STUCK, 4))
