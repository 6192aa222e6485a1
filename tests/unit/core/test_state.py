"""The state hash: what it covers, that it is the sum it claims to be, and the views of the state."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from raftmeta.core import commands as c
from raftmeta.core.apply import apply_batch
from raftmeta.core.state import SCALARS, State, encode_record, leaf
from raftmeta.core.tables import BULK, bulk_update
from raftmeta.core.types import OutcomeRecord, Phase
from tests.support.commands import World, check_state, command_bytes, publication, serving_world
from tests.support.state_hash import recompute_hash

EMPTY_HASH = "0c20b1f5657222e3cb1d590d61124fa034261c3123e63f27158d8473a87f083e"
WORLD_HASH = "f96a108a83089c8c9df23247bc10fad00bce3901591a3fc82708f46e76742c6a"


def a_full_world() -> World:
    world = serving_world()
    world.serve("1", "r1")
    world.serve("2", "r2")
    world.ok(c.RecordVerdict("d", "consistent", b"{}"))
    return world


def test_the_hash_of_known_states_stays_what_it_is() -> None:
    """A change of these values is a change of the format: members of two builds would call each other diverged."""
    assert State.empty().state_hash.hex() == EMPTY_HASH
    assert a_full_world().state.state_hash.hex() == WORLD_HASH


def test_a_leaf_is_the_sha256_of_kind_lengths_key_and_record() -> None:
    expected = hashlib.sha256(b"raftmeta state 1\0s" + (3).to_bytes(4, "little") + (2).to_bytes(4, "little") + b"keyre").digest()
    assert leaf(SCALARS, "key", b"re") == int.from_bytes(expected, "big")


def test_the_hash_covers_every_record_and_scalar() -> None:
    state = a_full_world().state
    replace = msgspec.structs.replace
    hashes = {state.state_hash}
    for field in ("revision", "generation", "feature_level", "cluster_ms", "keys_after_ms"):
        hashes.add(recompute_hash(replace(state, **{field: getattr(state, field) + 1})))
    hashes.add(recompute_hash(replace(state, limits=replace(state.limits, quota_bytes=1))))
    for table, key, field in (
        ("versions", "m/1", "number"),
        ("deployments", "d", "declared_revision"),
        ("rollouts", "r1", "ended_ms"),
        ("verdicts", "d", "revision"),
    ):
        records = getattr(state, table)
        changed = replace(records[key], **{field: getattr(records[key], field) + 1})
        hashes.add(recompute_hash(replace(state, **{table: records.insert(key, changed)})))
        if table != "versions":
            hashes.add(recompute_hash(replace(state, **{table: records.remove(key)})))
    entry = state.catalog["m"]
    for counter in ("last_number", "version_count", "created_revision", "created_ms"):
        record = replace(entry.record, **{counter: 9})
        hashes.add(recompute_hash(replace(state, catalog=state.catalog.insert("m", replace(entry, record=record)))))
    number, label, _ = next(iter(entry.versions))
    versions = entry.versions.removed(entry.versions.first_after((number,))).added((number, label, b"other manifest"))
    hashes.add(recompute_hash(replace(state, catalog=state.catalog.insert("m", replace(entry, versions=versions)))))
    hashes.add(recompute_hash(replace(state, outcomes=type(state.outcomes).of())))
    assert len(hashes) == 1 + 5 + 1 + 4 + 3 + 4 + 2


def test_records_of_two_maps_under_one_key_do_not_cancel_out() -> None:
    record = encode_record(State.empty().limits)
    assert len({leaf(kind, "d", record) for kind in (b"m", b"d", SCALARS)}) == 3


def test_a_generation_rises_and_changes_the_hash() -> None:
    state = a_full_world().state
    after = state.next_generation()
    assert (after.generation, after.revision) == (state.generation + 1, state.revision)
    assert after.state_hash == recompute_hash(after) != state.state_hash


def test_the_order_in_which_records_came_does_not_matter_to_the_sum() -> None:
    """Only what is there counts: a version published and deleted leaves the model's counter and nothing else."""
    world = World()
    world.ok(publication("m", "1"))
    there = world.state
    world.ok(publication("m", "2"))
    world.ok(c.DeleteVersion("m", "2"))
    assert world.state.versions == there.versions
    assert world.state.models["m"].last_number == 2


def test_outcomes_are_found_by_key() -> None:
    world = World()
    outcome = world.do(publication(), key="k")
    kept = world.state.outcome("k")
    assert isinstance(kept, OutcomeRecord)
    assert (kept.revision, kept.code, kept.result, kept.stamped_ms) == (1, "ok", outcome.result, world.now_ms)
    assert world.state.outcome("other") is None


def test_models_and_manifests_read_as_maps() -> None:
    state = serving_world().state
    assert list(state.models) == ["m"]
    assert len(state.models) == 1
    assert state.models["m"].version_count == 2
    assert state.models.get("x") is None
    assert dict(state.manifests) == {"m/1": b"manifest of m 1 ", "m/2": b"manifest of m 2 "}
    assert len(state.manifests) == 2
    assert "m/3" not in state.manifests
    assert list(state.versions_of("x")) == []


def test_versions_published_out_of_order_within_a_batch_come_out_by_number() -> None:
    """Deleting and publishing a label again in one batch moves it behind the others."""
    bodies: list[c.Body] = [publication("m", label) for label in ("1", "2", "3")]
    bodies += [c.DeleteVersion("m", "1"), publication("m", "1"), c.DeleteVersion("m", "2")]
    payloads = [command_bytes(body, f"k{place}") for place, body in enumerate(bodies)]
    state = apply_batch(State.empty(), payloads).state
    check_state(state)
    assert [(number, label) for number, label, _ in state.versions_of("m")] == [(3, "3"), (4, "1")]


def test_large_batches_reach_the_maps_in_parts() -> None:
    empty = State.empty().catalog
    written = {str(number): number for number in range(2 * BULK + 1)}
    assert dict(bulk_update(empty, written)) == written  # type: ignore[arg-type]
    assert bulk_update(empty, {}) is empty


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.SYNCING, Phase.COMMITTING, Phase.ACTIVE])
def test_the_hash_is_right_in_every_phase(phase: Phase) -> None:
    world = serving_world()
    world.start("1", "r1")
    world.reach("r1", phase)
    check_state(world.state)
