"""A few rows of the table of faults; `python -m tests.cluster.fault_matrix` makes all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("transformers")

from tests.cluster.fault_matrix import FAULTS, PHASES, Matrix, expected, matrix

pytestmark = pytest.mark.cluster

ROWS = (("fetch", "full arena"), ("fill", "kill control"), ("bind", "kill worker"), ("switch", "kill control"))


@pytest.fixture(scope="module")
def node() -> Iterator[Matrix]:
    try:
        with matrix() as made:
            yield made
    except OSError as cause:
        pytest.skip(f"small file systems cannot be mounted here: {cause}")


@pytest.mark.parametrize(("phase", "fault"), ROWS, ids=" ".join)
def test_a_fault_at_a_phase_of_an_update_ends_as_the_table_says(node: Matrix, phase: str, fault: str) -> None:
    row = node.run(phase, fault)
    assert not row.bad, row


def test_every_pair_of_phase_and_fault_has_an_expectation_or_a_reason() -> None:
    for phase in PHASES:
        for fault in FAULTS:
            cell = expected(phase, fault)
            assert cell.ends or cell.impossible, (phase, fault)
