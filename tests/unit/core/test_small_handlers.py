"""Verdicts and the feature level."""

from __future__ import annotations

import pytest

from raftmeta.core import commands as c
from raftmeta.core.handlers.verdicts import MAX_REPORT_BYTES
from raftmeta.core.state import SUPPORTED_FEATURE_LEVEL
from raftmeta.core.types import Verdict
from tests.support.commands import World, serving_world


def test_the_last_verdict_of_a_deployment_is_kept() -> None:
    world = serving_world()
    world.ok(c.RecordVerdict("d", "diverged", b"{}"), principal="checker")
    world.ok(c.RecordVerdict("d", "consistent", b'{"findings": []}'), principal="checker")
    expected = Verdict("d", "consistent", b'{"findings": []}', "checker", world.state.revision, world.now_ms)
    assert dict(world.state.verdicts) == {"d": expected}
    assert [(event.kind, event.key, event.value) for event in world.events] == [("verdict", "d", expected)]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (c.RecordVerdict("x", "consistent", b"{}"), "unknown_deployment"),
        (c.RecordVerdict("d", "fine", b"{}"), "bad_field"),
        (c.RecordVerdict("d", "consistent", b"x" * (MAX_REPORT_BYTES + 1)), "bad_field"),
    ],
)
def test_a_verdict_that_cannot_be_is_refused(body: c.Body, code: str) -> None:
    serving_world().refused(code, body)


def test_a_report_may_fill_its_limit() -> None:
    serving_world().ok(c.RecordVerdict("d", "consistent", b"x" * MAX_REPORT_BYTES))


def test_the_feature_level_rises_by_one_up_to_what_this_build_knows() -> None:
    world = World()
    for level in range(2, SUPPORTED_FEATURE_LEVEL + 1):
        assert world.ok(c.RaiseFeatureLevel(level)) == {"level": level}
        assert world.state.feature_level == level
    world.refused("feature_level_unsupported", c.RaiseFeatureLevel(SUPPORTED_FEATURE_LEVEL + 1))


def test_raising_to_the_present_level_changes_nothing() -> None:
    world = World()
    assert world.ok(c.RaiseFeatureLevel(1)) == {"level": 1}
    assert world.state.feature_level == 1


@pytest.mark.parametrize("level", [0, -1, 3, 4, 1 << 63])
def test_a_level_that_falls_skips_or_is_unknown_is_refused(level: int) -> None:
    World().refused("feature_level_unsupported", c.RaiseFeatureLevel(level))
