from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.layout import ALIGNMENT, Layout, align, fit, plan
from node_agent.refusal import Refusal
from raftmeta.core.manifest import TensorEntry

DIGEST = "0" * 64


def tensor(name: str, size: int, dtype: str = "U8") -> TensorEntry:
    return TensorEntry(name, dtype, (size,), "model.safetensors", 0, size, DIGEST, DIGEST)


sizes = st.one_of(st.integers(0, 2000), st.sampled_from([0, 1, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1]))
versions = st.dictionaries(st.text("abcdefgh", min_size=1, max_size=2), sizes, max_size=24).map(
    lambda named: [tensor(name, size) for name, size in named.items()]
)


def assert_sound(layout: Layout, tensors: list[TensorEntry]) -> None:
    assert [(p.name, p.size_bytes, p.dtype, p.shape) for p in layout.placements] == sorted(
        (t.name, t.size_bytes, t.dtype, t.shape) for t in tensors
    )
    cursor = 0
    for place in sorted((p for p in layout.placements if p.size_bytes), key=lambda p: p.offset):
        assert place.offset % ALIGNMENT == 0
        assert place.offset >= cursor, "two placements overlap"
        cursor = place.end
    assert cursor <= layout.total_bytes


@given(versions, st.randoms())
def test_a_layout_is_aligned_without_overlap_and_does_not_depend_on_the_order_of_its_input(
    tensors: list[TensorEntry], rng: random.Random
) -> None:
    layout = plan(tensors)
    assert_sound(layout, tensors)
    assert layout.total_bytes == sum(align(t.size_bytes) for t in tensors)
    shuffled = list(tensors)
    rng.shuffle(shuffled)
    assert plan(shuffled) == layout


@given(versions, versions)
def test_the_next_version_keeps_the_address_of_every_tensor_of_equal_name_and_size(old: list[TensorEntry], new: list[TensorEntry]) -> None:
    before = plan(old)
    after = plan(new, before)
    assert_sound(after, new)
    held = {(p.name, p.size_bytes): p.offset for p in before.placements}
    for place in after.placements:
        if (place.name, place.size_bytes) in held:
            assert place.offset == held[place.name, place.size_bytes]


@given(versions)
def test_an_unchanged_layout_is_the_same_layout(tensors: list[TensorEntry]) -> None:
    first = plan(tensors)
    assert plan(tensors, first) == first


def test_gaps_are_filled_before_the_slot_grows() -> None:
    before = plan([tensor("a", 256), tensor("b", 1024), tensor("c", 256)])
    after = plan([tensor("a", 256), tensor("b2", 512), tensor("b3", 512), tensor("c", 256)], before)
    assert after.total_bytes == before.total_bytes


def test_the_digest_binds_name_dtype_shape_and_offset() -> None:
    base = plan([tensor("a", 8), tensor("b", 8)])
    others = [
        plan([tensor("a", 8), tensor("c", 8)]),
        plan([tensor("a", 8), tensor("b", 8, "I8")]),
        plan([tensor("a", 8), TensorEntry("b", "U8", (2, 4), "f", 0, 8, DIGEST, DIGEST)]),
        plan([tensor("a", 8), tensor("b", 8)], plan([tensor("b", 8)])),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == 5


def test_a_name_that_stands_twice_is_refused() -> None:
    with pytest.raises(Refusal, match=r"bad_layout.*'a'.*one entry per name"):
        plan([tensor("a", 8), tensor("a", 8)])


@pytest.mark.parametrize("wrong", [("F32", (3,), 8), ("X9", (8,), 8)])
def test_a_tensor_that_does_not_take_the_bytes_it_is_given_is_refused_by_name(wrong: tuple[str, tuple[int, ...], int]) -> None:
    dtype, shape, size = wrong
    with pytest.raises(Refusal, match=r"bad_layout.*'w'") as caught:
        plan([TensorEntry("w", dtype, shape, "f", 0, size, DIGEST, DIGEST)])
    assert caught.value.phase == "plan"


def test_addresses_are_given_up_when_only_a_fresh_layout_fits() -> None:
    before = plan([tensor("a", 256), tensor("b", 256), tensor("c", 256)])
    wanted = [tensor("b", 256), tensor("z", 512)]
    assert plan(wanted, before).total_bytes > 768
    assert fit(wanted, before, 768) == plan(wanted)


def test_a_version_larger_than_the_slot_is_refused_with_both_numbers() -> None:
    with pytest.raises(Refusal, match=r"no_headroom.*1024 bytes.*768 bytes"):
        fit([tensor("a", 1000)], None, 768)
