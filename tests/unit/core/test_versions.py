"""Publishing and deleting versions: what is created, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from raftmeta.core import commands as c
from raftmeta.core.handlers.versions import MAX_ITEMS
from raftmeta.core.manifest import MAX_PACKED_BYTES
from raftmeta.core.types import Limits, Phase, Stage
from tests.support.commands import World, declaration, publication, serving_world


def changed_summary(**changes: object) -> c.Publish:
    body = publication()
    return msgspec.structs.replace(body, summary=msgspec.structs.replace(body.summary, **changes))


def test_a_publication_creates_the_model_and_a_numbered_version() -> None:
    world = World()
    assert world.ok(publication("m", "1.0.0")) == {"created": 1, "number": 1}
    assert world.ok(publication("m", "1.0.1"), principal="ci") == {"created": 1, "number": 2}
    version = world.state.versions["m/1.0.1"]
    assert (version.number, version.principal, version.published_revision) == (2, "ci", 2)
    assert version.published_ms == world.now_ms == world.state.cluster_ms
    model = world.state.models["m"]
    assert (model.last_number, model.version_count, model.created_revision) == (2, 2, 1)
    assert world.state.manifests["m/1.0.1"] == b"manifest of m 1.0.1 "
    assert [(event.revision, event.kind, event.key, event.op) for event in world.events] == [
        (2, "version", "m/1.0.1", "put"),
        (2, "model", "m", "put"),
    ]
    assert [event.value for event in world.events] == [version, model]


def test_the_same_bytes_under_the_same_label_change_nothing() -> None:
    world = World()
    world.ok(publication("m", "1"))
    version = world.state.versions["m/1"]
    assert world.ok(publication("m", "1")) == {"created": 0, "number": 1}
    assert world.state.versions["m/1"] is version
    assert world.events == ()
    assert world.state.revision == 2


def test_other_bytes_under_a_label_are_refused() -> None:
    world = World()
    world.ok(publication("m", "1"))
    world.refused("version_exists", publication("m", "1", "other"))


@pytest.mark.parametrize("model", ["", "M", "-m", "m/n", "m" * 129, "m\n", "mödel"])
def test_a_model_outside_its_alphabet_is_refused(model: str) -> None:
    World().refused("bad_name", publication(model))


@pytest.mark.parametrize("label", ["", "-1", "1/2", "1" * 129, "1\n", "1 0"])
def test_a_label_outside_its_alphabet_is_refused(label: str) -> None:
    World().refused("bad_name", publication("m", label))


@pytest.mark.parametrize("field", ["checksum", "config_digest", "weights_digest", "vector_root", "manifest_digest"])
@pytest.mark.parametrize("value", ["", "a" * 63, "a" * 65, "A" * 64, "g" * 64, "a" * 63 + "é", "a" * 63 + "\n"])
def test_a_digest_that_is_none_is_refused(field: str, value: str) -> None:
    outcome = World().refused("bad_field", changed_summary(**{field: value}))
    assert field in outcome.detail


@pytest.mark.parametrize("field", ["size_bytes", "weights_bytes", "file_count", "tensor_count"])
@pytest.mark.parametrize("value", [-1, 1 << 63])
def test_a_size_outside_63_bits_is_refused(field: str, value: int) -> None:
    World().refused("bad_field", changed_summary(**{field: value}))


def test_sizes_of_zero_and_of_63_bits_are_taken() -> None:
    World().ok(changed_summary(size_bytes=(1 << 63) - 1, tensor_count=0))


def test_a_manifest_other_than_the_digest_says_is_refused() -> None:
    World().refused("bad_manifest", msgspec.structs.replace(publication(), manifest=b"other bytes"))


def test_an_empty_manifest_is_refused() -> None:
    body = changed_summary(manifest_digest=hashlib.sha256(b"").hexdigest())
    World().refused("bad_manifest", msgspec.structs.replace(body, manifest=b""))


def test_a_manifest_may_fill_its_limit_and_not_exceed_it() -> None:
    world = World()
    world.ok(publication("m", "1", manifest=b"x" * MAX_PACKED_BYTES))
    world.refused("manifest_too_large", publication("m", "2", manifest=b"x" * (MAX_PACKED_BYTES + 1)))


def test_models_and_versions_are_bounded() -> None:
    world = World(Limits(max_models=1, max_versions_per_model=2))
    world.ok(publication("m", "1"))
    world.refused("quota_exceeded", publication("n", "1"))
    world.ok(publication("m", "2"))
    world.refused("quota_exceeded", publication("m", "3"))
    world.ok(c.DeleteVersion("m", "1"))
    assert world.ok(publication("m", "3")) == {"created": 1, "number": 3}


def test_the_quota_counts_keys_records_and_manifests() -> None:
    world = World(Limits(quota_bytes=3_000))
    world.ok(publication("m", "1", manifest=b"x" * 1_000))
    world.refused("quota_exceeded", publication("m", "2", manifest=b"x" * 3_000))
    world.refused("quota_exceeded", c.PublishBatch((publication("m", "2"), publication("m", "3", manifest=b"x" * 3_000))))
    world.ok(publication("m", "1", manifest=b"x" * 1_000))  # changes nothing, so it needs no room


def test_what_needs_no_room_works_when_there_is_none() -> None:
    world = serving_world()
    world.use_up_quota()
    world.refused("quota_exceeded", publication("m", "3"))
    world.ok(publication("m", "1"))
    world.ok(c.PublishBatch((publication("m", "1"), publication("m", "2"))))
    world.ok(declaration())


def test_deleting_works_above_the_quota_and_makes_room() -> None:
    world = World()
    world.ok(publication("m", "1", manifest=b"x" * 1_200))
    world.use_up_quota()
    world.refused("quota_exceeded", publication("m", "2"))  # whose outcome takes room that is not there
    assert world.state.size_bytes > world.state.limits.quota_bytes
    world.ok(c.DeleteVersion("m", "1"))
    world.ok(publication("m", "2"))


def test_numbers_are_not_used_again_after_a_deletion() -> None:
    world = World()
    world.ok(publication("m", "1"))
    assert world.ok(c.DeleteVersion("m", "1")) == {"number": 1}
    assert "m/1" not in world.state.versions
    assert "m/1" not in world.state.manifests
    assert world.state.models["m"].version_count == 0
    assert [(event.kind, event.op) for event in world.events] == [("version", "delete"), ("model", "put")]
    assert world.ok(publication("m", "1", "other")) == {"created": 1, "number": 2}


def test_deleting_what_is_not_there_is_refused() -> None:
    world = World()
    world.refused("unknown_model", c.DeleteVersion("m", "1"))
    world.ok(publication("m", "1"))
    world.refused("unknown_version", c.DeleteVersion("m", "2"))


def test_what_serves_what_undo_needs_and_what_is_on_its_way_cannot_be_deleted() -> None:
    world = serving_world()
    world.start("1", "r1")
    world.refused("in_use", c.DeleteVersion("m", "1"))
    world.reach("r1", Phase.ACTIVE)
    world.refused("in_use", c.DeleteVersion("m", "1"))
    world.serve("2", "r2")
    assert "rolls back to" in world.refused("in_use", c.DeleteVersion("m", "1")).detail
    assert "serves" in world.refused("in_use", c.DeleteVersion("m", "2")).detail
    world.ok(publication("m", "3"))
    world.serve("3", "r3")
    world.ok(c.DeleteVersion("m", "1"))


def test_a_version_that_no_deployment_names_can_be_deleted_at_any_time() -> None:
    world = serving_world()
    world.ok(publication("m", "3"))
    world.ok(c.DeleteVersion("m", "3"))
    world.start("1", "r1")
    world.ok(c.DeleteVersion("m", "2"))


def test_a_version_of_an_ended_rollout_can_be_deleted() -> None:
    world = serving_world()
    world.start("1", "r1")
    world.attest("r1", Stage.FAILED, only=["a1"])
    world.ok(c.AbortRollout("r1", "out_of_memory", "a1", ""))
    world.ok(c.DeleteVersion("m", "1"))


def test_the_same_label_of_another_model_can_be_deleted() -> None:
    world = serving_world()
    world.ok(publication("n", "1"))
    world.serve("1", "r1")
    world.ok(c.DeleteVersion("n", "1"))


def test_a_batch_creates_all_with_a_revision_each() -> None:
    world = World()
    world.ok(publication("m", "1"))
    items = (publication("m", "2"), publication("m", "1"), publication("n", "1"), publication("m", "2"))
    outcome = world.do(c.PublishBatch(items))
    assert (outcome.code, outcome.revision, world.state.revision) == ("ok", 5, 5)
    assert msgspec.msgpack.decode(outcome.result) == {"created": [1, 0, 1, 0], "numbers": [2, 1, 1, 2]}
    assert world.state.versions["m/2"].published_revision == 2
    assert world.state.versions["n/1"].published_revision == 4
    assert [(event.revision, event.key) for event in world.events] == [(2, "m/2"), (2, "m"), (4, "n/1"), (4, "n")]


def test_a_batch_with_one_bad_item_creates_nothing() -> None:
    world = World()
    items = (publication("m", "1"), publication("n", "1"), publication("m", "1", "other"))
    outcome = world.refused("version_exists", c.PublishBatch(items))
    assert msgspec.msgpack.decode(outcome.result) == {"item": 2}
    assert outcome.detail.startswith("item 2: ")
    assert world.ok(publication("m", "1")) == {"created": 1, "number": 1}


def test_a_refused_batch_leaves_what_the_log_entry_did_before_it() -> None:
    world = World()
    world.ok(publication("m", "1"))
    world.ok(c.DeleteVersion("m", "1"))
    world.refused("bad_name", c.PublishBatch((publication("m", "1"), publication("m", "/"))))
    assert world.state.models["m"].version_count == 0


@pytest.mark.parametrize("count", [0, MAX_ITEMS + 1])
def test_a_batch_has_1_to_1000_items(count: int) -> None:
    World().refused("bad_field", c.PublishBatch((publication(),) * count))
    assert len(World().ok(c.PublishBatch((publication(),) * MAX_ITEMS))["numbers"]) == MAX_ITEMS
