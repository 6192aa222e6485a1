"""Evidence: one record for each node of a deployment, by the node's own word, and for as long as it has its place."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from raftmeta import codec
from raftmeta.core import commands as c
from raftmeta.core.apply import HANDLERS
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import Evidence, Policy, Side, SideName
from tests.support.commands import World, declaration, digest_of, evidence, publication, serving_world, snapshot


def world() -> World:
    made = serving_world(level=2)
    made.serve("1", "r1")
    return made


def order(made: World) -> int:
    return made.state.deployments["d"].order_revision


def test_evidence_is_kept_with_the_place_of_its_node_and_the_time_of_the_cluster() -> None:
    made = world()
    made.ok(evidence("b1", "1", order_revision=order(made)), principal="agent:b1")
    kept = made.state.evidence["d/b1"]
    summary = publication("m", "1").summary
    assert (kept.side, kept.zone, kept.version, kept.checksum) == (SideName.STANDBY, "b", "1", summary.checksum)
    assert (kept.order_revision, kept.revision, kept.recorded_ms) == (order(made), made.state.revision, made.now_ms)
    assert (kept.verified_age_ms, kept.told_ms, kept.boot_id) == (250, 1_000, "boot-1")
    assert [(event.kind, event.key, event.value) for event in made.events] == [("evidence", "d/b1", kept)]


def test_a_node_may_say_that_nothing_verified_serves_any_more() -> None:
    made = world()
    made.ok(evidence("a1"))
    empty = {"version": "", "checksum": "", "vector_root": "", "config_digest": "", "finding": "integrity_mismatch"}
    made.ok(evidence("a1", told_ms=2_000, **empty))
    kept = made.state.evidence["d/a1"]
    assert (kept.version, kept.checksum, kept.finding) == ("", "", "integrity_mismatch")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"deployment": "nowhere"}, "unknown_deployment"),
        ({"node": "c1"}, "unknown_node"),
        ({"node": "a"}, "unknown_node"),
        ({"node": "a11"}, "unknown_node"),
        ({"boot_id": ""}, "bad_name"),
        ({"version": "/"}, "bad_name"),
        ({"checksum": ""}, "bad_field"),
        ({"vector_root": "f" * 63}, "bad_field"),
        ({"config_digest": "F" * 64}, "bad_field"),
        ({"derived_digest": "x"}, "bad_field"),
        ({"tokenizer_digest": digest_of("t") + "\n"}, "bad_field"),
        ({"version": ""}, "bad_field"),
        ({"finding": "Not a class"}, "bad_field"),
        ({"told_ms": -1}, "bad_field"),
        ({"verified_age_ms": 1 << 63}, "bad_field"),
        ({"generation": 1}, "bad_field"),
        ({"order_revision": 10_000}, "bad_field"),
    ],
)
def test_evidence_that_cannot_be_is_refused_and_changes_nothing(changes: dict[str, Any], code: str) -> None:
    made = world()
    made.ok(evidence("a1", told_ms=1))
    made.refused(code, evidence("a1", **changes) if "node" not in changes else msgspec.structs.replace(evidence(), **changes))


def test_a_word_of_another_boot_that_obeyed_an_earlier_order_changes_nothing() -> None:
    """Held up on its way, with a clock that says nothing across boots."""
    made = world()
    order = made.state.deployments["d"].order_revision
    made.ok(evidence("a1", "1", boot_id="boot-2", order_revision=order, told_ms=5))
    outcome = made.refused("stale_evidence", evidence("a1", "2", boot_id="boot-1", order_revision=order - 1, told_ms=9_000))
    assert f"(0, {order})" in outcome.detail and f"(0, {order - 1})" in outcome.detail
    made.ok(evidence("a1", "1", boot_id="boot-2", order_revision=order - 1, told_ms=6))
    made.ok(evidence("a1", "1", boot_id="boot-3", order_revision=order, told_ms=1))


@pytest.mark.parametrize(
    ("boot", "told_ms", "counts"), [("boot-1", 999, False), ("boot-1", 1_000, False), ("boot-1", 1_001, True), ("boot-2", 3, True)]
)
def test_an_earlier_word_of_the_same_boot_changes_nothing(boot: str, told_ms: int, counts: bool) -> None:
    made = world()
    made.ok(evidence("a1", "1", told_ms=1_000))
    late = evidence("a1", "2", boot_id=boot, told_ms=told_ms)
    made.ok(late) if counts else made.refused("stale_evidence", late)
    assert made.state.evidence["d/a1"].version == ("2" if counts else "1")


def test_a_node_that_leaves_takes_its_record_along_and_one_that_moves_keeps_it() -> None:
    made = world()
    for node in ("a1", "a2", "b1"):
        made.ok(evidence(node))
    made.ok(declaration("d", "m", ("a1", "b1"), ("c1",)))
    assert {key: (record.side, record.zone) for key, record in made.state.evidence.items()} == {
        "d/a1": (SideName.PRIMARY, "a"),
        "d/b1": (SideName.PRIMARY, "a"),
    }
    told = [(event.key, event.op) for event in made.events if event.kind == "evidence"]
    assert told == [("d/a2", "delete"), ("d/b1", "put")]
    made.ok(msgspec.structs.replace(declaration("d", "m", ("a1",), ()), primary=Side("z", ("a1",))))
    assert {key: record.zone for key, record in made.state.evidence.items()} == {"d/a1": "z"}


def test_a_deployment_that_is_declared_as_it_was_keeps_what_its_nodes_said() -> None:
    made = world()
    made.ok(evidence("a1"))
    made.ok(declaration())
    made.ok(msgspec.structs.replace(declaration(), policy=Policy(prepare_timeout_ms=5_000)))
    assert sorted(made.state.evidence) == ["d/a1"]


def test_evidence_counts_towards_the_quota_and_is_taken_when_nothing_fits_any_more() -> None:
    made = world()
    before = made.state.size_bytes
    made.use_up_quota()
    made.ok(evidence("a1"))
    assert made.state.size_bytes > before + len(codec.encode_record(made.state.evidence["d/a1"]))
    assert not HANDLERS[c.RecordEvidence].bound_by_quota


def frames(made: World) -> list[tuple[int, bytes]]:
    return list(codec._read_frames([snapshot(made.state)]))


def read(parts: list[tuple[int, bytes]]) -> None:
    codec.restore([codec.MAGIC + b"".join(codec._FRAME.pack(kind, len(payload)) + payload for kind, payload in parts)])


def test_a_snapshot_holds_evidence_in_the_order_of_the_nodes_and_no_other() -> None:
    made = world()
    for node in ("b1", "a2", "a1"):
        made.ok(evidence(node))
    parts = frames(made)
    found = [place for place, (kind, _) in enumerate(parts) if kind == codec.EVIDENCE]
    nodes = [msgspec.msgpack.decode(parts[place][1], type=Evidence).node for place in found]
    assert nodes == ["a1", "a2", "b1"]
    read(parts)
    swapped = list(parts)
    swapped[found[0]], swapped[found[1]] = parts[found[1]], parts[found[0]]
    twice = [*parts[: found[1]], parts[found[0]], *parts[found[1] :]]
    stranger = msgspec.msgpack.decode(parts[found[2]][1], type=Evidence)
    moved = list(parts)
    moved[found[2]] = (codec.EVIDENCE, codec.encode_record(msgspec.structs.replace(stranger, side=SideName.PRIMARY)))
    elsewhere = list(parts)
    elsewhere[found[2]] = (codec.EVIDENCE, codec.encode_record(msgspec.structs.replace(stranger, zone="c")))
    for bad in (swapped, twice, moved, elsewhere):
        with pytest.raises(RaftmetaError, match="evidence of node"):
            read(bad)


@settings(max_examples=40, deadline=None)
@given(hs.lists(hs.tuples(hs.sampled_from(["a1", "a2", "b1"]), hs.sampled_from(["x", "y"]), hs.integers(0, 6)), max_size=14))
def test_of_all_that_arrives_in_any_order_the_latest_word_of_a_boot_is_kept(said: list[tuple[str, str, int]]) -> None:
    made = world()
    kept: dict[str, tuple[str, int]] = {}
    for node, boot, told_ms in said:
        outcome = made.do(evidence(node, boot_id=boot, told_ms=told_ms))
        last = kept.get(node)
        assert (outcome.code == "ok") == (last is None or last[0] != boot or last[1] < told_ms)
        if outcome.code == "ok":
            kept[node] = (boot, told_ms)
    assert {record.node: (record.boot_id, record.told_ms) for record in made.state.evidence.values()} == kept
