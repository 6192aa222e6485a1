from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

import msgspec
import pytest

from node_agent.device import arena as arena_module
from node_agent.device import checked, headroom
from node_agent.device.arena import Arena, ArenaHeader
from node_agent.device.headroom import Limit
from node_agent.device.port import EMPTY_RECORD, SlotRecord, SlotState
from node_agent.device.process import this_process
from node_agent.refusal import Refusal

RECORD = SlotRecord(version="1.0.0", checksum="c" * 64, manifest_digest="d" * 64, layout_digest="e" * 64, generation=1, revision=7)
PAGE = 4096


def rewrite_header(path: Path, **changes: object) -> None:
    header = checked.read(path.read_bytes()[:PAGE], ArenaHeader)
    assert header is not None
    with path.open("r+b") as file:
        file.write(checked.encode(msgspec.structs.replace(header, **changes), PAGE))


def test_a_new_arena_is_allocated_readable_by_the_group_and_empty(shm: Path) -> None:
    arena = Arena.create(shm / "arena", 1_000_000)
    status = (shm / "arena").stat()
    assert stat.S_IMODE(status.st_mode) == 0o640
    assert status.st_blocks * 512 >= status.st_size > 2 * arena.slot_bytes >= 2_000_000
    assert [arena.record(slot) for slot in (0, 1)] == [EMPTY_RECORD, EMPTY_RECORD]
    assert [path.name for path in shm.iterdir()] == ["arena"]
    arena.close()


def test_the_mapping_is_populated_and_stays_out_of_core_dumps(shm: Path) -> None:
    for arena in (Arena.create(shm / "arena", 4 << 20), Arena.open(shm / "arena")):
        entry = smaps_entries(shm / "arena")[-1]
        assert f"Rss: {(8 << 20) // 1024 + 64} kB" in " ".join(entry.split())
        assert " dd" in entry, "the flag for MADV_DONTDUMP"
        arena.close()


def smaps_entries(path: Path) -> list[str]:
    text = Path("/proc/self/smaps").read_text()
    return ["\n".join(part.split("\n")[:30]) for part in text.split("VmFlags:") if str(path) in part for part in [text[text.index(part) :]]]


def test_bytes_are_writable_only_after_the_header_says_dirty(shm: Path) -> None:
    arena = Arena.create(shm / "arena", 1)
    with pytest.raises(Refusal, match=r"slot_not_dirty.*empty"):
        arena.staging_view(0)
    assert arena.slot_view(0).readonly
    arena.mark_dirty(0, RECORD)
    arena.staging_view(0)[:4] = b"abcd"
    arena.mark_verified(0, "f" * 64, "0" * 64)
    with pytest.raises(Refusal, match=r"slot_not_dirty.*verified"):
        arena.staging_view(0)
    assert bytes(arena.slot_view(0)[:4]) == b"abcd"


def test_a_slot_serves_only_when_verified_and_becomes_verified_only_from_dirty(shm: Path) -> None:
    arena = Arena.create(shm / "arena", 1)
    for state in (SlotState.EMPTY, SlotState.DIRTY):
        with pytest.raises(Refusal, match=f"slot_not_verified.*{state}"):
            arena.serving_view(1)
        with pytest.raises(Refusal, match=f"slot_not_verified.*{state}"):
            arena.verified(1)
        if state is SlotState.EMPTY:
            with pytest.raises(Refusal, match="slot_not_dirty"):
                arena.mark_verified(1, "f" * 64, "0" * 64)
            arena.mark_dirty(1, RECORD)
    arena.mark_verified(1, "f" * 64, "0" * 64)
    assert arena.serving_view(1).nbytes == arena.slot_bytes
    assert arena.record(0) == EMPTY_RECORD


def test_what_a_slot_holds_survives_the_process_that_wrote_it(shm: Path) -> None:
    first = Arena.create(shm / "arena", 1)
    first.mark_dirty(0, RECORD)
    written = first.mark_verified(0, "f" * 64, "0" * 64)
    first.close()
    again = Arena.open(shm / "arena", readonly=False)
    assert again.record(0) == written
    assert written == msgspec.structs.replace(RECORD, state=SlotState.VERIFIED, vector_root="f" * 64, snapshot_digest="0" * 64)


def test_a_record_torn_at_any_byte_reads_as_the_old_one_or_as_empty() -> None:
    old, new = bytearray(PAGE), bytearray(PAGE)
    before = msgspec.structs.replace(RECORD, state=SlotState.DIRTY)
    after = msgspec.structs.replace(RECORD, state=SlotState.VERIFIED, vector_root="f" * 64)
    checked.write(memoryview(old), before)
    checked.write(memoryview(new), after)
    length = len(checked.encode(after, PAGE))
    seen = []
    for cut in range(length + 1):
        seen.append(checked.read(bytes(new[:cut] + old[cut:]), SlotRecord))
    assert seen[0] == before
    assert seen[length] == after
    assert set(seen[1:length]) <= {None, before, after}
    assert seen.index(after) >= length - 1 or new[seen.index(after) : length] == old[seen.index(after) : length]


def test_a_flipped_bit_in_a_record_makes_the_slot_empty(shm: Path) -> None:
    arena = Arena.create(shm / "arena", 1)
    arena.mark_dirty(0, RECORD)
    arena.mark_verified(0, "f" * 64, "0" * 64)
    data = bytearray((shm / "arena").read_bytes())
    data[PAGE + 50] ^= 1
    with (shm / "arena").open("r+b") as file:
        file.write(data[: 2 * PAGE])
    assert arena.record(0) == EMPTY_RECORD
    with pytest.raises(Refusal, match="slot_not_verified"):
        arena.serving_view(0)


def test_a_second_writer_is_refused_by_the_name_of_the_first_while_readers_are_welcome(shm: Path) -> None:
    first = Arena.create(shm / "arena", 1)
    for attempt in (lambda: Arena.open(shm / "arena", readonly=False), lambda: Arena.create(shm / "arena", 1)):
        with pytest.raises(Refusal, match=f"arena_in_use.*process {os.getpid()} "):
            attempt()
    reader = Arena.open(shm / "arena")
    assert reader.header == first.header
    first.close()
    second = Arena.open(shm / "arena", readonly=False)
    assert second.header.owner == this_process()
    second.close()
    assert Arena.create(shm / "arena", 1).header.arena_id != reader.header.arena_id


def test_a_reader_cannot_change_anything(shm: Path) -> None:
    Arena.create(shm / "arena", 1).close()
    reader = Arena.open(shm / "arena")
    with pytest.raises(Refusal, match="read-only"):
        reader.mark_dirty(0, RECORD)
    with pytest.raises(TypeError):
        reader.slot_view(0)[0] = 1


FOREIGN = {
    "another boot": ({"boot_id": "elsewhere"}, "boot elsewhere"),
    "another format": ({"format": "raftmeta-arena-9"}, "raftmeta-arena-9"),
    "another size": ({"slot_bytes": 1 << 40}, "bytes"),
}


@pytest.mark.parametrize("case", FOREIGN)
@pytest.mark.parametrize("readonly", [True, False])
def test_an_arena_of_another_boot_format_or_size_is_refused_by_name(shm: Path, case: str, readonly: bool) -> None:
    Arena.create(shm / "arena", 1).close()
    changes, found = FOREIGN[case]
    rewrite_header(shm / "arena", **changes)
    before = (shm / "arena").read_bytes()
    with pytest.raises(Refusal, match=f"foreign_arena.*{shm / 'arena'}.*{found}"):
        Arena.open(shm / "arena", readonly)
    assert (shm / "arena").read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"short", b"\0" * PAGE, b"something of somebody else " * 1000])
def test_a_file_that_is_no_arena_is_never_mapped_and_replaced_by_create_alone(shm: Path, content: bytes) -> None:
    """Nobody else makes files of that name: a header that does not check is one that rotted."""
    (shm / "arena").write_bytes(content)
    with pytest.raises(Refusal, match="foreign_arena"):
        Arena.open(shm / "arena")
    assert (shm / "arena").read_bytes() == content
    assert Arena.create(shm / "arena", 1).record(0) == EMPTY_RECORD


def test_a_damaged_arena_that_somebody_writes_to_is_not_replaced(shm: Path) -> None:
    writer = Arena.create(shm / "arena", 1)
    with (shm / "arena").open("r+b") as file:
        file.write(b"\0" * PAGE)
    with pytest.raises(Refusal, match="arena_in_use"):
        Arena.create(shm / "arena", 1)
    assert writer.slot_view(0)[0] == 0


def test_a_link_a_pipe_a_directory_and_a_file_of_another_user_are_neither_opened_nor_replaced(shm: Path) -> None:
    Arena.create(shm / "target", 1).close()
    (shm / "link").symlink_to(shm / "target")
    os.mkfifo(shm / "pipe")
    (shm / "directory").mkdir()
    for name in ("link", "pipe", "directory"):
        with pytest.raises((Refusal, OSError), match=r"foreign_arena.*a plain file|symbolic links|directory"):
            Arena.open(shm / name, readonly=name == "directory")
        with pytest.raises(Refusal, match=r"foreign_arena.*a plain file of .*user.*left alone"):
            Arena.create(shm / name, 1)
    if os.geteuid() == 0:
        os.chown(shm / "target", 65534, 65534)
        with pytest.raises(Refusal, match=r"foreign_arena.*user 65534, left alone"):
            Arena.create(shm / "target", 1)
    assert sorted(path.name for path in shm.iterdir()) == ["directory", "link", "pipe", "target"]


def test_an_arena_of_an_earlier_boot_is_replaced_by_create(shm: Path) -> None:
    Arena.create(shm / "arena", 1).close()
    rewrite_header(shm / "arena", boot_id="earlier")
    assert Arena.create(shm / "arena", 1).record(0) == EMPTY_RECORD


def test_a_crash_while_creating_leaves_nothing_that_stops_the_next_one(shm: Path) -> None:
    (shm / ".arena.fresh").write_bytes(b"half an arena")
    Arena.create(shm / "arena", 1)
    assert [path.name for path in shm.iterdir()] == ["arena"]


def test_too_little_room_is_refused_before_anything_is_allocated_with_every_limit_in_the_way(shm: Path) -> None:
    limits = (Limit("the file system", 10), Limit("the machine", 1000), Limit("control group /a", 20))
    with pytest.raises(Refusal, match=r"no_headroom.*100 bytes.*10 bytes left in the file system; 20 bytes left in control group /a$"):
        headroom.require(shm, 100, limits)
    headroom.require(shm, 10, limits)
    with pytest.raises(Refusal, match=r"no_headroom.*mount option size=.*MemAvailable"):
        Arena.create(shm / "arena", 1 << 50)
    assert list(shm.iterdir()) == []


def test_the_limits_of_a_control_group_and_those_above_it_count(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("1:name=systemd:/x\n0::/agent.slice/agent.service\n")
    root = tmp_path / "fs"
    leaf = root / "agent.slice" / "agent.service"
    leaf.mkdir(parents=True)
    (leaf / "memory.max").write_text("max\n")
    (leaf / "memory.current").write_text("5\n")
    (leaf.parent / "memory.max").write_text("1000\n")
    (leaf.parent / "memory.current").write_text("400\n")
    found = list(headroom._control_groups(tmp_path / "cgroup", root))
    assert [limit.free_bytes for limit in found] == [600]
    assert "agent.slice" in found[0].what
    assert "MemoryMax" in found[0].what


def test_the_lock_is_the_kernels_so_a_dead_owner_never_blocks(shm: Path) -> None:
    Arena.create(shm / "arena", 1).close()
    fd = os.open(shm / "arena", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(Refusal, match="arena_in_use"):
        Arena.open(shm / "arena", readonly=False)
    os.close(fd)  # what the kernel does when a process ends, however it ends
    Arena.open(shm / "arena", readonly=False).close()


def test_without_madvise_populate_every_page_is_touched_and_no_byte_changes(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena.create(shm / "arena", 1 << 20)
    arena.mark_dirty(0, RECORD)
    arena.staging_view(0)[:] = bytes(range(256)) * (arena.slot_bytes // 256)
    before = (shm / "arena").read_bytes()
    monkeypatch.setattr(arena_module, "_POPULATE_READ", 9999)
    monkeypatch.setattr(arena_module, "_POPULATE_WRITE", 9999)
    arena.close()
    for readonly in (True, False):
        opened = Arena.open(shm / "arena", readonly)
        assert (shm / "arena").read_bytes()[PAGE:] == before[PAGE:]
        assert f"Rss: {(2 << 20) // 1024 + 64} kB" in " ".join(smaps_entries(shm / "arena")[-1].split())
        opened.close()
