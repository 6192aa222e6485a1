from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node_agent.device.arena import Arena
from node_agent.device.cpu import CpuDevice
from node_agent.device.port import SlotState
from node_agent.device.snapshot import SlotSnapshot, Snapshots
from node_agent.refusal import Refusal
from node_agent.staging import ALONE, Manner, Staged, StageOrder, plan, stage
from raftmeta.core.errors import ErrorClass
from raftmeta.core.manifest import Manifest, TensorEntry, weights_digest
from tests.support.shm import shm_directory
from tests.support.versions import MemoryBlobs, manifest_of
from tests.support.weights import Tensors


def tensors(**values: int) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """One float tensor of 40 x 30 per name; equal values are equal bytes."""
    return {name: ("F32", (40, 30), bytes((value + i) % 256 for i in range(4800))) for name, value in values.items()}


V1 = tensors(a=1, b=2, c=3, d=4)
V2 = tensors(a=1, b=2, c=3, d=40)
V3 = tensors(a=1, b=20, c=3, d=40)
SIZE = 4800


@dataclass
class Node:
    """An arena, what its store has, and which slot serves."""

    path: Path
    blobs: MemoryBlobs = field(default_factory=lambda: MemoryBlobs(V1, V2, V3))
    active: int | None = None
    slot_bytes: int = 1 << 16

    def __post_init__(self) -> None:
        self.arena = Arena.create(self.path, self.slot_bytes)
        self.snapshots = Snapshots(self.path)

    def restart(self) -> None:
        self.arena.close()
        self.arena = Arena.open(self.path, readonly=False)

    def order(self, slot: int, manifest: Manifest) -> StageOrder:
        checksum = hashlib.sha256(manifest.vector_root.encode()).hexdigest()
        return StageOrder("1.0.0", checksum, manifest, weights_digest(manifest), slot, self.active, 1, 5)

    def stage(self, slot: int, version: Tensors | Manifest, activate: bool = True, how: Manner = ALONE) -> Staged:
        manifest = version if isinstance(version, Manifest) else manifest_of(version)
        staged = stage(CpuDevice(self.arena), self.snapshots, self.order(slot, manifest), self.blobs, how=how)
        if activate:
            self.active = slot
        return staged

    def bytes_of(self, slot: int) -> dict[str, bytes]:
        snapshot = self.snapshots.load(slot, self.arena.record(slot).snapshot_digest)
        assert snapshot is not None
        memory = self.arena.slot_view(slot)
        return {p.name: bytes(memory[p.offset : p.end]) for p in snapshot.layout.placements}

    def damage(self, slot: int, name: str) -> None:
        """Flip a bit behind the arena's back."""
        snapshot = self.snapshots.load(slot, self.arena.record(slot).snapshot_digest)
        assert snapshot is not None
        place = next(p for p in snapshot.layout.placements if p.name == name)
        with self.path.open("r+b") as file:
            file.seek((1 << 16) + slot * self.arena.slot_bytes + place.offset + 100)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 0x80]))


@pytest.fixture
def node(shm: Path) -> Node:
    return Node(shm / "arena")


def costs(staged: Staged) -> tuple[int, int, int, int]:
    """(read, from active, kept, changed), the first three in tensors."""
    c = staged.counters
    assert c.bytes_read + c.bytes_from_active + c.bytes_kept == c.bytes_total
    return c.bytes_read // SIZE, c.bytes_from_active // SIZE, c.bytes_kept // SIZE, c.tensors_changed


def test_the_first_version_is_read_from_the_store_and_verified_in_memory(node: Node) -> None:
    staged = node.stage(0, V1)
    assert costs(staged) == (4, 0, 0, 4)
    assert node.bytes_of(0) == {name: data for name, (_, _, data) in V1.items()}
    record = node.arena.verified(0)
    assert record == staged.record
    assert record.vector_root == manifest_of(V1).vector_root
    assert (record.version, record.generation, record.revision) == ("1.0.0", 1, 5)
    assert record.layout_digest == staged.layout.digest


def test_the_next_version_reads_what_changed_and_copies_the_rest_from_the_active_slot(node: Node) -> None:
    node.stage(0, V1)
    node.blobs = MemoryBlobs({"d": V2["d"]})
    assert costs(node.stage(1, V2)) == (1, 3, 0, 1)
    assert node.bytes_of(1) == {name: data for name, (_, _, data) in V2.items()}


def test_the_version_after_that_stages_only_what_differs_from_what_its_slot_holds(node: Node) -> None:
    node.stage(0, V1)
    node.stage(1, V2)
    assert costs(node.stage(0, V3)) == (1, 1, 2, 1)
    assert node.bytes_of(0) == {name: data for name, (_, _, data) in V3.items()}


def test_a_roll_back_to_what_the_slot_holds_moves_no_byte_and_says_so(node: Node) -> None:
    node.stage(0, V1)
    node.stage(1, V2)
    node.blobs = MemoryBlobs()
    assert costs(node.stage(0, V1)) == (0, 0, 4, 1)


def test_staging_the_version_that_is_active_is_reported_as_no_change(node: Node) -> None:
    node.stage(0, V1)
    assert costs(node.stage(1, V1)) == (0, 4, 0, 0)
    assert costs(node.stage(0, V1)) == (0, 0, 4, 0)


def test_the_plan_names_the_blobs_that_must_be_fetched_and_touches_nothing(node: Node) -> None:
    node.stage(0, V1)
    before = node.path.read_bytes()
    made = plan(CpuDevice(node.arena), node.snapshots, node.order(1, manifest_of(V2)))
    assert made.from_store == ((hashlib.sha256(V2["d"][2]).hexdigest(), SIZE),)
    assert made.tensors_changed == 1
    assert node.path.read_bytes() == before
    assert node.arena.record(1).state is SlotState.EMPTY


def test_the_fetched_bytes_are_those_the_fetcher_counted(node: Node) -> None:
    order = node.order(0, manifest_of(V1))
    assert stage(CpuDevice(node.arena), node.snapshots, order, node.blobs, bytes_fetched=123).counters.bytes_fetched == 123


def test_what_a_slot_holds_is_known_after_a_restart(node: Node) -> None:
    node.stage(0, V1)
    node.stage(1, V2)
    node.restart()
    assert costs(node.stage(0, V3)) == (1, 1, 2, 1)


def refused(node: Node, slot: int, version: Tensors | Manifest) -> Refusal:
    """Stage and be refused: the slot must not serve, the active one must be byte for byte as before."""
    active = None if node.active is None else bytes(node.arena.slot_view(node.active))
    with pytest.raises(Refusal) as caught:
        node.stage(slot, version, activate=False)
    if node.active is not None:
        assert bytes(node.arena.slot_view(node.active)) == active
        node.arena.verified(node.active)
    if slot != node.active:
        with pytest.raises(Refusal, match="slot_not_verified"):
            node.arena.serving_view(slot)
    return caught.value


def test_a_blob_with_wrong_bytes_is_named_and_the_next_try_reads_only_it(node: Node) -> None:
    node.stage(0, V1)
    right = dict(node.blobs.blobs)
    sha256 = hashlib.sha256(V2["d"][2]).hexdigest()
    node.blobs.blobs[sha256] = b"\0" * SIZE
    refusal = refused(node, 1, V2)
    assert (refusal.kind, refusal.phase, refusal.error_class) == ("vector_mismatch", "verify", ErrorClass.INTEGRITY)
    assert "'d' (store)" in refusal.subject
    assert refusal.expected == next(t.entry for t in manifest_of(V2).tensors if t.name == "d")
    assert node.arena.record(1).state is SlotState.DIRTY
    node.blobs = MemoryBlobs()
    node.blobs.blobs = right
    assert costs(node.stage(1, V2)) == (1, 0, 3, 1)


def test_a_missing_blob_leaves_the_slot_dirty(node: Node) -> None:
    node.stage(0, V1)
    node.blobs = MemoryBlobs()
    refusal = refused(node, 1, V2)
    assert (refusal.kind, refusal.phase, refusal.error_class) == ("source_failed", "fill", ErrorClass.UNAVAILABLE)
    assert "'d'" in refusal.subject
    assert "not_found" in refusal.found
    assert node.arena.record(1).state is SlotState.DIRTY


def test_damage_in_the_active_slot_is_found_when_it_is_copied_and_named_as_such(node: Node) -> None:
    node.stage(0, V1)
    node.damage(0, "b")
    refusal = refused(node, 1, V2)
    assert refusal.kind == "vector_mismatch"
    assert "'b' (active)" in refusal.subject


def test_damage_in_what_the_slot_kept_is_found_and_repaired_by_the_next_try(node: Node) -> None:
    node.stage(0, V1)
    node.stage(1, V2)
    node.damage(0, "a")
    refusal = refused(node, 0, V1)
    assert "'a' (kept)" in refusal.subject
    assert costs(node.stage(0, V1)) == (0, 1, 3, 1)
    assert node.bytes_of(0) == {name: data for name, (_, _, data) in V1.items()}


def altered(manifest: Manifest, name: str, **changes: object) -> Manifest:
    return msgspec.structs.replace(
        manifest, tensors=tuple(msgspec.structs.replace(t, **changes) if t.name == name else t for t in manifest.tensors)
    )


def test_what_was_computed_a_moment_ago_and_stays_is_not_read_again_and_everything_else_is(node: Node) -> None:
    first = node.stage(1, V1, activate=False)
    node.damage(1, "a")
    fresh = {name: vector for name, vector in first.vectors.items() if name in ("a", "d")}
    staged = node.stage(1, V2, activate=False, how=Manner(fresh=fresh))
    assert staged.record.vector_root == manifest_of(V2).vector_root, "kept on the word of its freshness; d changed, so it was read"
    node.damage(1, "b")
    with pytest.raises(Refusal, match=r"vector_mismatch.*'b'"):
        node.stage(1, V2, activate=False, how=Manner(fresh=fresh))


def test_an_entry_that_is_fresh_but_of_other_bytes_is_a_mismatch(node: Node) -> None:
    first = node.stage(1, V1, activate=False)
    with pytest.raises(Refusal, match=r"vector_mismatch.*'a'"):
        node.stage(1, V2, activate=False, how=Manner(fresh={"a": first.vectors["d"]}))


@pytest.mark.parametrize("changes", [{"dtype": "I32"}, {"shape": (30, 40)}, {"entry": "0" * 64}])
def test_a_swapped_dtype_shape_or_entry_is_refused_after_the_bytes_were_compared(node: Node, changes: dict[str, object]) -> None:
    node.stage(0, V1)
    refusal = refused(node, 1, altered(manifest_of(V2), "c", **changes))
    assert (refusal.kind, refusal.phase) == ("vector_mismatch", "verify")
    assert "'c'" in refusal.subject


def test_a_tensor_that_the_manifest_left_out_shows_in_the_root(node: Node) -> None:
    node.stage(0, V1)
    whole = manifest_of(V2)
    refusal = refused(node, 1, msgspec.structs.replace(whole, tensors=whole.tensors[:-1]))
    assert (refusal.kind, refusal.expected) == ("vector_mismatch", whole.vector_root)
    assert "root" in refusal.subject


def test_the_active_slot_and_a_version_that_is_too_large_are_refused_before_anything_is_written(node: Node) -> None:
    node.stage(0, V1)
    node.stage(1, V2)
    before = node.path.read_bytes()
    assert refused(node, 1, V3).kind == "slot_active"
    large = {f"t{i}": ("F32", (40, 30), bytes(SIZE)) for i in range(20)}
    with pytest.raises(Refusal, match=r"no_headroom.*97280 bytes.*65536 bytes") as caught:
        node.stage(0, large)
    assert (caught.value.phase, caught.value.error_class) == ("plan", ErrorClass.CAPACITY)
    bad = manifest_of(V3).tensors[0]
    with pytest.raises(Refusal, match="bad_layout"):
        node.stage(0, msgspec.structs.replace(manifest_of(V3), tensors=(TensorEntry(bad.name, "F64", bad.shape, *list_of(bad)),)))
    assert node.path.read_bytes() == before


def list_of(tensor: TensorEntry) -> tuple[str, int, int, str, str]:
    return tensor.file, tensor.begin, tensor.end, tensor.sha256, tensor.entry


def test_a_crash_while_filling_leaves_a_dirty_slot_and_the_next_try_keeps_what_was_whole(node: Node) -> None:
    node.stage(0, V1)
    node.stage(1, V2)
    node.blobs.interrupt_at = len(node.blobs.reads)
    with pytest.raises(KeyboardInterrupt):
        node.stage(0, V3)
    node.restart()
    assert node.arena.record(0).state is SlotState.DIRTY
    with pytest.raises(Refusal, match="slot_not_verified"):
        node.arena.serving_view(0)
    node.blobs.interrupt_at = None
    assert costs(node.stage(0, V3)) == (1, 1, 2, 1)


def test_a_lost_or_damaged_snapshot_costs_time_and_nothing_else(node: Node, shm: Path) -> None:
    node.stage(0, V1)
    for damage in (lambda path: path.unlink(), lambda path: path.write_bytes(b"{}")):
        for path in shm.glob("*.json"):
            damage(path)
        node.snapshots = Snapshots(node.path)  # another process, which has not seen them as they were
        assert costs(node.stage(0 if node.active else 1, V1)) == (4, 0, 0, 4)
        assert len(list(shm.glob(f"*.slot{node.active}.*.json"))) == 1


def test_a_changed_layout_keeps_the_tensors_whose_address_it_keeps(node: Node) -> None:
    node.stage(0, V1)
    node.stage(1, V2)
    grown = {**tensors(a=1, c=3, e=9), "d": ("F32", (41, 30), bytes(4920))}
    node.blobs.add(grown)
    staged = node.stage(0, grown)
    assert (staged.counters.bytes_kept, staged.counters.bytes_read) == (2 * SIZE, SIZE + 4920)
    assert node.bytes_of(0) == {name: data for name, (_, _, data) in grown.items()}


def test_nothing_is_copied_from_an_active_slot_of_which_nothing_is_known(node: Node) -> None:
    node.stage(0, V1)
    node.arena.mark_empty(0)
    assert costs(node.stage(1, V2)) == (4, 0, 0, 4)


def test_from_an_active_slot_in_which_damage_was_found_only_what_its_list_still_names_is_copied(node: Node) -> None:
    staged = node.stage(0, V1)
    held = {name: hashlib.sha256(data).hexdigest() for name, (_, _, data) in V1.items() if name != "a"}
    node.damage(0, "a")
    digest = node.snapshots.save(0, SlotSnapshot(staged.layout, held))
    node.arena.mark_dirty(0, msgspec.structs.replace(staged.record, snapshot_digest=digest))
    assert costs(node.stage(1, V2)) == (2, 2, 0, 2)
    assert node.bytes_of(1) == {name: data for name, (_, _, data) in V2.items()}


def test_empty_and_scalar_tensors_are_staged_too(node: Node) -> None:
    odd: Tensors = {"none": ("F32", (0, 4), b""), "one": ("F64", (), b"12345678"), "flag": ("BOOL", (3,), b"\1\0\1")}
    node.blobs.add(odd)
    node.stage(0, odd)
    assert node.bytes_of(0) == {name: data for name, (_, _, data) in odd.items()}


contents = st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(0, 3), st.sampled_from([7, 256, 1000])), min_size=1)


@settings(max_examples=40, deadline=None)
@given(st.lists(contents, min_size=1, max_size=6))
def test_after_any_sequence_of_versions_the_slot_holds_exactly_the_last_one(sequence: list[dict[str, tuple[int, int]]]) -> None:
    with shm_directory() as directory:
        node = Node(directory / "arena")
        for number, version in enumerate(sequence):
            made: Tensors = {name: ("U8", (size,), bytes([value]) * size) for name, (value, size) in version.items()}
            node.blobs.add(made)
            counters = node.stage(number % 2, made).counters
            assert node.bytes_of(number % 2) == {name: data for name, (_, _, data) in made.items()}
            assert counters.bytes_read + counters.bytes_from_active + counters.bytes_kept == counters.bytes_total
            assert node.arena.verified(number % 2).vector_root == manifest_of(made).vector_root
        node.arena.close()
