"""No reply leaves before the write is on disk where it must be, seen from outside; and the judge of it is not blind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cluster.fsync_order import Trace, judge, measure, violations

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("zones", [("a",), ("a", "b", "c")], ids=["one member", "three members"])
def test_every_write_is_synced_on_leader_and_quorum_before_its_reply(tmp_path: Path, zones: tuple[str, ...]) -> None:
    if shutil.which("strace") is None:
        pytest.skip("NOT CHECKED HERE: this witness needs strace (Debian: apt-get install strace)")
    rows = measure(tmp_path, zones, 12)
    assert len(rows) == 12
    assert violations(rows, len(zones)) == []


def test_the_judge_sees_a_reply_that_left_before_the_sync_returned() -> None:
    written = {"k": [(1.0, 7)]}
    late = Trace(synced=[(1.1, 2.0, 7)], journaled=written, replied={"k": 1.9})
    assert violations(judge({"a": late}, ["k"], "a"), 1)
    other_file = Trace(synced=[(1.1, 1.2, 8)], journaled=written, replied={"k": 1.9})
    assert violations(judge({"a": other_file}, ["k"], "a"), 1)
    before_the_write = Trace(synced=[(0.5, 1.5, 7)], journaled=written, replied={"k": 1.9})
    assert violations(judge({"a": before_the_write}, ["k"], "a"), 1)
    good = Trace(synced=[(1.1, 1.2, 7)], journaled=written, replied={"k": 1.9})
    assert not violations(judge({"a": good}, ["k"], "a"), 1)
    assert violations(judge({"a": good, "b": Trace(), "c": Trace()}, ["k"], "a"), 3)
