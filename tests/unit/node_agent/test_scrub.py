"""The order of a pass: the same on every node, every block once, and never later than the interval allows."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from consistency.vector import BLOCK_BYTES
from node_agent import scrub
from node_agent.scrub import Order, Remedy, Span

CHECKSUM = "ab" * 32
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=8)
SIZES = st.dictionaries(NAMES, st.integers(0, 40 * BLOCK_BYTES), max_size=12)
SEEDS = st.binary(min_size=32, max_size=32)


@given(SIZES, SEEDS)
def test_every_block_of_every_tensor_is_read_exactly_once_a_pass(sizes: dict[str, int], seed: bytes) -> None:
    order = Order(sizes, seed)
    runs = list(order)
    assert len(runs) == len(order)
    read = [(span.tensor, block) for run in runs for span in run for block in range(span.first, span.first + span.blocks)]
    assert sorted(read) == sorted((name, block) for name, size in sizes.items() for block in range(-(-size // BLOCK_BYTES)))
    assert sum(order.run_bytes(run) for run in runs) == order.total_bytes == sum(sizes.values())
    assert all(sum(span.blocks for span in run) <= scrub.RUN_BLOCKS and run for run in runs)


@given(SIZES, SEEDS, st.randoms())
def test_two_nodes_read_in_the_same_order_however_their_slots_are_laid_out(sizes: dict[str, int], seed: bytes, chance: object) -> None:
    items = list(sizes.items())
    chance.shuffle(items)  # type: ignore[attr-defined]
    assert list(Order(sizes, seed)) == list(Order(dict(items), seed))


def test_the_order_is_the_same_in_every_process_and_build() -> None:
    sizes = {"b": 40 * BLOCK_BYTES, "a": 3 * BLOCK_BYTES + 5, "empty": 0, "c": 9}
    begins = [(run[0].tensor, run[0].first) for run in Order(sizes, scrub.seed(CHECKSUM, 495_001))]
    assert begins == [("a", 0), ("b", 28), ("b", 12)]
    code = (
        "from node_agent import scrub; "
        f"print([(r[0].tensor, r[0].first) for r in scrub.Order({sizes!r}, scrub.seed({CHECKSUM!r}, 495_001))])"
    )
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, env=environment)
        assert done.stdout.strip() == str(begins)


def test_runs_cross_tensors_and_end_with_the_last_block() -> None:
    order = Order({"a": 3 * BLOCK_BYTES, "b": 15 * BLOCK_BYTES + 1}, bytes(32))
    assert sorted(order) == [(Span("a", 0, 3), Span("b", 0, 13)), (Span("b", 13, 3),)]
    assert {order.run_bytes(run) for run in order} == {16 * BLOCK_BYTES, 2 * BLOCK_BYTES + 1}


def test_another_pass_and_another_version_are_read_in_another_order() -> None:
    sizes = {"a": 4000 * BLOCK_BYTES}
    orders = [tuple(Order(sizes, seed)) for seed in (scrub.seed(CHECKSUM, 1), scrub.seed(CHECKSUM, 2), scrub.seed("cd" * 32, 1))]
    assert len(set(orders)) == 3
    assert all(order != tuple(sorted(order)) for order in orders)


@given(st.integers(1, 1 << 42), st.floats(0.1, 1e6), st.data())
def test_a_pass_that_keeps_to_its_due_times_ends_within_the_interval(total: int, interval_s: float, data: st.DataObject) -> None:
    done = data.draw(st.integers(0, total))
    assert 0 <= scrub.due_s(done, total, interval_s) <= scrub.due_s(total, total, interval_s) < interval_s
    assert scrub.due_s(total, total, interval_s) * scrub.needed_bytes_per_s(total, interval_s) >= total * 0.999
    assert scrub.due_s(0, 0, interval_s) == 0


def test_passes_are_numbered_alike_by_everybody_whose_clock_shows_the_same_interval() -> None:
    assert scrub.pass_number(7200.0, 3600.0) == scrub.pass_number(10799.9, 3600.0) == 2
    assert scrub.pass_number(10800.0, 3600.0) == 3


def test_the_blocks_that_differ_in_either_sum_are_named() -> None:
    expected = np.arange(10, dtype=np.uint64).reshape(5, 2)
    found = expected.copy()
    found[1, 0] ^= np.uint64(1)
    found[4, 1] ^= np.uint64(1 << 63)
    assert scrub.wrong_blocks(expected, found) == [1, 4]
    assert scrub.wrong_blocks(expected, expected) == []
    assert scrub.sums_text(expected[1]) == "0000000000000002:0000000000000003"


def test_what_is_too_much_to_write_while_requests_wait_goes_into_the_other_slot() -> None:
    assert scrub.remedy(1) is scrub.remedy(scrub.MAX_IN_PLACE_BLOCKS) is Remedy.REPAIR
    assert scrub.remedy(scrub.MAX_IN_PLACE_BLOCKS + 1) is Remedy.RESTAGE


def test_a_clock_before_1970_gives_a_pass_too() -> None:
    assert scrub.pass_number(-5.0, 3600) == 0
    assert scrub.seed("ab" * 32, scrub.pass_number(-5.0, 3600))
