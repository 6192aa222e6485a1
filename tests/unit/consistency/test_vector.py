"""The vector's definition: stored values, agreement with the slow reference, independence of pieces, threads, alignment and byte order."""

from __future__ import annotations

import hashlib
import itertools
import mmap
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency import block_sidecar, vector
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import DTYPE_BITS
from tests.support import wcv_reference

BACKENDS = ["numpy", "numba", "torch"]
# lengths around the edges of words, blocks and pairs of blocks
LENGTHS = [0, 1, 7, 8, 9, 15, 16, 65_528, 65_529, 65_536, 65_537, 65_544, 131_072, 131_071, 131_085, 196_608, 262_144 + 24, 5 * 65_536]


def noise(size: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()


@pytest.fixture(params=BACKENDS)
def chosen(request: pytest.FixtureRequest) -> vector.Backend:
    return vector.backend(request.param)


def test_the_first_key_is_the_published_one() -> None:
    assert int(vector.keys()[0]) == 0x93049B658946D647
    assert vector.keys().size == 8193
    assert vector.keys().tolist() == wcv_reference.KEYS


def test_every_key_is_odd_so_that_a_changed_word_always_changes_its_sum() -> None:
    assert all(key % 2 == 1 for key in vector.keys().tolist())


def test_the_published_test_vector_holds(chosen: vector.Backend) -> None:
    made = vector.tensor_entry(bytes(range(256)), "U8", (256,), chosen)
    assert made.blocks.tolist() == [[0xE83730E42C787F00, 0xB6A9B961E40D03E4]]
    assert made.entry == "96e3022a0ab3d5e477f38d72170ffbc13f3f49bb20229cb77755f98aaba06d4d"
    assert vector.root({"x": made.entry}) == "1180a26502ebe42ad6127813fa89812ad1c5e92dffd4bbdb4c76da87b247089a"


def test_the_long_stored_vector_is_that_of_the_reference() -> None:
    data, expected = vector.CHECK_LONG
    assert wcv_reference.entry(data, "U8", (len(data),)) == expected


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_gives_the_blocks_of_the_reference(chosen: vector.Backend, length: int) -> None:
    data = noise(length)
    made = vector.tensor_entry(data, "U8", (length,), chosen)
    assert [tuple(pair) for pair in made.blocks.tolist()] == wcv_reference.blocks(data)
    assert made.entry == wcv_reference.entry(data, "U8", (length,))


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_dtype_and_rank_are_part_of_the_entry(dtype: str) -> None:
    width = DTYPE_BITS[dtype] // 8
    shapes: list[tuple[int, ...]] = [(), (1,), (1, 1), (3, 2), (0,), (0, 4), (2, 0, 3)]
    for shape in shapes:
        data = noise(width * int(np.prod(shape, dtype=int)))
        assert vector.tensor_entry(data, dtype, shape).entry == wcv_reference.entry(data, dtype, shape)
    assert len({vector.tensor_entry(b"", dtype, shape).entry for shape in [(0,), (0, 4), (4, 0)]}) == 3


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(0, 3 * 65_536 + 20),
    cuts=st.lists(st.integers(0, 3 * 65_536 + 20), max_size=8),
    name=st.sampled_from(BACKENDS),
)
def test_any_pieces_give_the_same_vector(length: int, cuts: list[int], name: str) -> None:
    data = memoryview(noise(length))
    edges = sorted({0, length, *(cut for cut in cuts if cut < length)})
    pieces = vector.BlockVector(vector.backend(name))
    for begin, end in itertools.pairwise(edges):
        pieces.update(data[begin:end])
    whole = vector.tensor_entry(data, "U8", (length,), vector.backend(name))
    made = pieces.finish("U8", (length,))
    assert made.entry == whole.entry
    assert np.array_equal(made.blocks, whole.blocks)


def test_many_single_bytes_give_the_same_vector() -> None:
    data = noise(70_001)
    pieces = vector.BlockVector()
    for byte in data:
        pieces.update(bytes([byte]))
    assert pieces.finish("U8", (70_001,)).entry == vector.tensor_entry(data, "U8", (70_001,)).entry


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_block_ranges_on_any_number_of_threads_give_the_same_blocks(chosen: vector.Backend, threads: int) -> None:
    data = memoryview(noise(11 * vector.BLOCK_BYTES + 100))
    step = threads * vector.BLOCK_BYTES
    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(lambda at: vector.block_checks(data[at : at + step], chosen), range(0, len(data), step)))
    assert np.array_equal(np.concatenate(parts), vector.block_checks(data, chosen))


def test_read_only_shared_memory_at_an_odd_address_is_read_in_place(chosen: vector.Backend) -> None:
    data = noise(150_001)
    with tempfile.TemporaryFile() as file:
        file.write(b"\xff" * 3 + data)
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            view = memoryview(mapped)[3:]
            assert view.readonly
            entry = vector.tensor_entry(view, "U8", (150_001,), chosen).entry
            view.release()  # nothing holds the mapping, so it can be closed
    assert entry == wcv_reference.entry(data, "U8", (150_001,))


def test_numpy_arrays_of_any_shape_count_as_their_bytes(chosen: vector.Backend) -> None:
    data = noise(24_000)
    array = np.frombuffer(data, np.uint8).reshape(20, 30, 40)
    assert vector.tensor_entry(array, "F32", (20, 300), chosen).entry == wcv_reference.entry(data, "F32", (20, 300))


def test_a_host_of_the_other_byte_order_gets_the_same_blocks(chosen: vector.Backend) -> None:
    # Such a host reads every word swapped; reversing the bytes of each word shows the kernel what it would see there.
    data = noise(3 * vector.BLOCK_BYTES + 64)
    swapped = np.frombuffer(data, np.uint64).byteswap()
    out = np.empty((4, 2), np.uint64)
    vector.Backend("there", chosen.kernel, "big" if chosen.byteorder == "little" else "little").sums(swapped, out)
    assert [tuple(pair) for pair in out.tolist()] == wcv_reference.blocks(data)


def test_the_root_depends_on_names_and_entries_but_not_on_their_order() -> None:
    one, two = "11" * 32, "22" * 32
    assert vector.root({"a": one, "b": two}) == vector.root({"b": two, "a": one})
    others = [{"a": two, "b": one}, {"a": one}, {"a": one, "c": two}, {"ab": one, "": two}, {}]
    assert len({vector.root(entries) for entries in [{"a": one, "b": two}, *others]}) == 6


def test_names_are_ordered_by_their_utf8_bytes() -> None:
    entries = {"\U0001f600": "11" * 32, "\uff5e": "22" * 32, "z": "33" * 32, "é": "44" * 32}
    by_bytes = dict(sorted(entries.items(), key=lambda item: item[0].encode()))
    assert vector.root(entries) == vector.root(by_bytes)
    assert list(by_bytes) == ["z", "é", "\uff5e", "\U0001f600"]


def test_block_checks_survive_their_wire_form() -> None:
    blocks = vector.block_checks(noise(3 * 65_536))
    assert vector.pack_blocks(blocks)[:8] == int(blocks[0, 0]).to_bytes(8, "little")
    assert np.array_equal(vector.unpack_blocks(vector.pack_blocks(blocks)), blocks)
    assert vector.unpack_blocks(b"").shape == (0, 2)
    with pytest.raises(RaftmetaError, match="pairs of 16 bytes, found 24") as caught:
        vector.unpack_blocks(bytes(24))
    assert caught.value.code == "bad_field"


@pytest.mark.parametrize(
    ("dtype", "shape", "size", "reason"),
    [
        ("F33", (1,), 4, "dtype 'F33' is unknown"),
        ("F32", (2,), 4, r"F32 \[2\] does not take the 4 bytes"),
        ("F32", (), 0, r"F32 \[\] does not take the 0 bytes"),
        ("U8", (-1, -4), 4, "does not take the 4 bytes"),
    ],
)
def test_figures_that_contradict_each_other_are_refused(dtype: str, shape: tuple[int, ...], size: int, reason: str) -> None:
    with pytest.raises(RaftmetaError, match=reason) as caught:
        vector.tensor_entry(bytes(size), dtype, shape)
    assert caught.value.code == "bad_field"


def test_block_checks_of_another_size_are_refused() -> None:
    with pytest.raises(RaftmetaError, match=r"shape \(2, 2\), found \(1, 2\)"):
        vector.entry_of("U8", (65_537,), 65_537, np.zeros((1, 2), np.uint64))


def test_memory_with_holes_is_refused() -> None:
    for strided in (np.zeros((8, 8), np.uint8)[:, ::2], memoryview(bytes(16))[::2]):
        with pytest.raises(RaftmetaError, match="contiguous"):
            vector.tensor_entry(strided, "U8", (32,))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(RaftmetaError, match="'cuda' is unknown, expected one of numba, numpy, torch"):
        vector.backend("cuda")


def test_the_published_page_is_enough_to_implement_it() -> None:
    page = (Path(__file__).parents[3] / "docs" / "wcv.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert code is not None
    theirs: dict[str, Any] = {}
    exec(code[1], theirs)  # the only program that the page holds
    inputs = [
        (bytes(range(256)), "U8", (256,)),
        (vector.CHECK_LONG[0], "U8", (196_621,)),
        (b"", "F32", (0, 4)),
        (b"abcd", "F32", ()),
    ]
    for data, dtype, shape in inputs:
        entry = vector.tensor_entry(data, dtype, shape).entry
        assert theirs["entry"](data, dtype, shape) == entry
        assert f"entry `{entry}`" in page
    named = {"x": vector.CHECK_SHORT[1], "é": vector.CHECK_LONG[1]}
    assert theirs["root"](named) == vector.root(named)
    sets = {name: ("U8", (len(data),), data) for name, (data, _) in {"x": vector.CHECK_SHORT, "y": vector.CHECK_LONG}.items()}
    ours = block_sidecar.pack({name: vector.block_checks(data) for name, (_, _, data) in sets.items()})
    assert theirs["block_file"]({name: data for name, (_, _, data) in sets.items()}) == ours
    assert f"a file of {len(ours)} bytes, SHA-256 `{hashlib.sha256(ours).hexdigest()}`" in page
    assert f"root `{vector.root({})}`" in page and f"root `{vector.root({'x': vector.CHECK_SHORT[1]})}`" in page
