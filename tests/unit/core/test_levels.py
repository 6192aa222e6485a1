"""Feature levels: what a lower level promises to members of an earlier build, and what may be proposed at which."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from raftmeta.core import commands as c
from raftmeta.core.apply import HANDLERS, apply_batch
from raftmeta.core.levels import level_fault, needed_level, raise_fault
from raftmeta.core.state import SUPPORTED_FEATURE_LEVEL, State
from raftmeta.core.types import DrainOverdue, Policy
from tests.support.commands import command_bytes, declaration, snapshot
from tests.support.level_one import log_of

LOGS = 40
LOGS_SHA256 = "548c022604a2b5d7c1f9683e007c7b59c9d0f085367c4bdc595f260407f5e4ba"
HASHES_SHA256 = "12946cb5cd536190e3c592b31ad5aaa61c9405fcacab0b154a0987354f053d35"
SNAPSHOTS_SHA256 = "69beaebeadfb0da48c6853119b8457083f53b3ef4f1f656cd7cc18acfe3253a2"


def test_logs_of_level_one_give_the_states_that_the_last_build_of_it_gave() -> None:
    """The digests were made by that build: over the bytes of all logs, over the state hashes after them, and over their snapshots."""
    logs, hashes, snapshots = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    for seed in range(LOGS):
        payloads = log_of(seed)
        logs.update(b"".join(payloads))
        state = apply_batch(State.empty(), payloads).state
        hashes.update(state.state_hash)
        snapshots.update(snapshot(state))
    assert logs.hexdigest() == LOGS_SHA256, "the logs are others: nothing is said of the states"
    assert (hashes.hexdigest(), snapshots.hexdigest()) == (HASHES_SHA256, SNAPSHOTS_SHA256)


LEVEL_ONE = {
    c.Publish, c.PublishBatch, c.DeleteVersion, c.DeclareDeployment, c.Activate, c.RollBack, c.Attest, c.AdvanceRollout, c.AbortRollout,
    c.RecordVerdict, c.RaiseFeatureLevel,
}  # fmt: skip


def test_no_command_that_came_later_is_understood_at_level_one() -> None:
    assert {kind for kind, handler in HANDLERS.items() if handler.level == 1} == LEVEL_ONE


def newer(place: int) -> list[bytes]:
    """A command of every type that came after level 1, with whatever values its fields take."""
    made = []
    for number, kind in enumerate(HANDLERS):
        if kind not in LEVEL_ONE:
            made.append(command_bytes(sample(kind), f"newer-{place}-{number}"))
    return made


def sample(kind: type) -> c.Body:
    return msgspec.convert([kind.__struct_config__.tag, *(_some(field.type) for field in msgspec.structs.fields(kind))], c.Body)


def _some(shape: object) -> object:
    match msgspec.inspect.type_info(shape):
        case msgspec.inspect.StrType():
            return "d"
        case msgspec.inspect.IntType():
            return 1
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.BytesType():
            return b"{}"
        case msgspec.inspect.EnumType(cls=cls):
            return next(iter(cls)).value
        case msgspec.inspect.StructType(cls=cls):
            return [_some(field.type) for field in msgspec.structs.fields(cls)]
        case msgspec.inspect.VarTupleType() | msgspec.inspect.ListType():
            return []
        case msgspec.inspect.UnionType():
            return None
        case other:
            raise AssertionError(other)


@settings(max_examples=30, deadline=None)
@given(hs.integers(0, LOGS - 1), hs.data())
def test_at_level_one_a_newer_command_is_to_every_build_what_bytes_are_that_nobody_can_read(seed: int, data: hs.DataObject) -> None:
    """An earlier build cannot decode it; this one can and must come to the same state."""
    mixed, garbled = [], []
    for place, payload in enumerate(log_of(seed, 40)):
        mixed.append(payload)
        garbled.append(payload)
        for made in newer(place) if data.draw(hs.booleans()) else []:
            mixed.append(made)
            garbled.append(b"\xc1")
    one, other = apply_batch(State.empty(), mixed), apply_batch(State.empty(), garbled)
    assert snapshot(one.state) == snapshot(other.state)
    assert one.events == other.events


@pytest.mark.parametrize(
    ("policy", "needed"),
    [
        (Policy(), 1),
        (Policy(prepare_timeout_ms=1, sync_timeout_ms=2), 1),
        (Policy(drain_timeout_ms=1_000), 2),
        (Policy(drain_overdue=DrainOverdue.CANCEL), 2),
    ],
)
def test_a_policy_that_says_how_to_drain_needs_level_two(policy: Policy, needed: int) -> None:
    body = msgspec.structs.replace(declaration(), policy=policy)
    assert needed_level(body) == needed
    assert bool(level_fault(body, 1)) == (needed > 1)
    assert level_fault(body, 2) == ""


def test_every_command_may_be_proposed_at_the_highest_level_and_none_below_its_own() -> None:
    for kind, handler in HANDLERS.items():
        body = sample(kind)
        assert level_fault(body, SUPPORTED_FEATURE_LEVEL) == ""
        assert level_fault(body, handler.level - 1)


def test_what_a_refused_raise_says_is_the_same_in_every_build() -> None:
    """It is kept with the outcome, so it enters the state hash. These are the words of the builds of level 1."""
    _, (outcome,), _ = apply_batch(State.empty(), [command_bytes(c.RaiseFeatureLevel(0), "k")])
    assert outcome.detail == "feature level 0 after 1; it rises by one and this build knows levels up to 1"


@pytest.mark.parametrize(
    ("features", "names"),
    [
        ({"a": 2, "b": 2, "c": 2}, ()),
        ({"a": 2, "b": 3, "c": 2}, ()),
        ({"a": 2, "b": 1, "c": 2}, ("b (up to 1)",)),
        ({"a": 2, "b": 0, "c": 2}, ("without a link: b",)),
        ({"a": 1, "b": 0, "c": 1}, ("a (up to 1), c (up to 1)",)),
    ],
)
def test_a_level_is_raised_only_with_the_word_of_every_member(features: dict[str, int], names: tuple[str, ...]) -> None:
    fault = raise_fault(2, features)
    assert all(name in fault for name in names)
    assert bool(fault) == bool(names)
