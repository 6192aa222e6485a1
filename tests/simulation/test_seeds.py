"""120 seeds on every run of the suite; equal seeds give equal traces, in processes with different hash seeds too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from raftmeta.core.state import SUPPORTED_FEATURE_LEVEL
from tests.simulation.cluster import Cluster, Plan

SEEDS = 120
PARTS = 12
CALM_S = 18.0  # a leader compares states every ten seconds, and who is set aside then has to catch up


@pytest.mark.parametrize("part", range(PARTS))
def test_no_invariant_breaks_under_faults(part: int) -> None:
    for seed in range(1 + part * SEEDS // PARTS, 1 + (part + 1) * SEEDS // PARTS):
        report = Cluster(Plan(seed, members=5 if seed % 4 == 0 else 3, stormy_s=8.0, calm_s=CALM_S)).run()
        assert report.acknowledged > 0, seed
        assert report.leader_changes > 0, seed


@pytest.mark.parametrize("seed", range(1, 9))
def test_no_invariant_breaks_in_a_cluster_that_begins_at_the_highest_level(seed: int) -> None:
    cluster = Cluster(Plan(seed, members=5 if seed % 4 == 0 else 3, stormy_s=8.0, calm_s=CALM_S, feature=SUPPORTED_FEATURE_LEVEL))
    assert cluster.run().acknowledged > 0
    levels = {member.replica.state.feature_level for member in cluster.members.values() if member.replica}
    assert levels == {SUPPORTED_FEATURE_LEVEL}


def test_the_same_seed_gives_the_same_trace_in_every_process() -> None:
    script = (
        "from tests.simulation.cluster import Cluster, Plan\n"
        "print(*(Cluster(Plan(s, members=m, stormy_s=10.0, calm_s=12.0)).run().trace for s, m in ((7, 3), (8, 5))))"
    )
    traces = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(traces) == 1 and len(next(iter(traces)).split()) == 2
