"""Some of the flips that `python -m tests.cluster.bit_flips` makes a thousand of: every dtype, first and last words, a derived buffer."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from raftmeta.core.manifest import DTYPE_BITS
from tests.cluster.bit_flips import run

pytestmark = pytest.mark.cluster


def test_every_flipped_bit_is_found_named_and_mended_and_no_request_is_lost() -> None:
    count = len(DTYPE_BITS) + 5
    found = run(count, seed=3, derived_every=2 * len(DTYPE_BITS))  # after every dtype had its turn
    assert found.is_complete, found
    assert {kind.split()[0] for kind in found.by_kind} == {*DTYPE_BITS, "derived"}
    assert found.flips == count and found.asked > 0
