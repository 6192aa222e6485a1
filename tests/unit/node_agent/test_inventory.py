from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from node_agent.device import checked, inventory, mapped
from node_agent.device.arena import Arena, ArenaUse
from node_agent.device.inventory import ArenaState
from tests.support.shm import line_of, python_process
from tests.unit.node_agent.test_arena import PAGE, rewrite_header

NAME = "raftmeta-n1-search-0123456789abcdef.arena"
USE = ArenaUse("/var/lib/raftmeta", "n1", "search")
MAPS = """
import sys, mmap, os
from pathlib import Path
from node_agent.device.arena import Arena
arena = Arena.open(Path(sys.argv[1]))
os.close(arena._fd)
print("mapped", flush=True)
sys.stdin.read()
"""


def make(shm: Path, name: str = NAME, use: ArenaUse = USE) -> Path:
    Arena.create(shm / name, 1, use).close()
    return shm / name


def state_of(path: Path) -> ArenaState:
    found = inventory.look(path)
    assert found is not None
    return found.state


def test_an_arena_that_nobody_maps_is_kept_and_says_whose_it_is(shm: Path) -> None:
    path = make(shm)
    (found,) = inventory.find(shm)
    assert (found.path, found.state, found.use) == (path, ArenaState.KEPT, USE)
    assert found.size_bytes >= 3 << 16
    assert [slot.state for slot in found.slots] == ["empty", "empty"]


def test_an_arena_is_in_use_while_a_process_maps_it_even_without_a_descriptor_and_however_it_ends(shm: Path) -> None:
    path = make(shm)
    with python_process(MAPS, str(path)) as process:
        assert line_of(process) == "mapped"
        assert state_of(path) is ArenaState.IN_USE
        assert inventory.reclaim(path) == 0 and path.exists()
    assert state_of(path) is ArenaState.KEPT


def test_a_writer_alone_is_a_user_too(shm: Path) -> None:
    arena = Arena.create(shm / NAME, 1, USE)
    assert state_of(shm / NAME) is ArenaState.IN_USE
    arena.close()
    assert state_of(shm / NAME) is ArenaState.KEPT


@pytest.mark.parametrize(
    ("changes", "state"), [({"boot_id": "earlier"}, ArenaState.EARLIER_BOOT), ({"format": "raftmeta-arena-9"}, ArenaState.OTHER_FORMAT)]
)
def test_what_can_never_serve_again_is_told_apart_and_reclaimed_with_what_lies_beside_it(
    shm: Path, changes: dict[str, object], state: ArenaState
) -> None:
    path = make(shm)
    rewrite_header(path, **changes)
    beside = [shm / f"{NAME}.slot0.abc.json", path.with_suffix(".control")]
    other = make(shm, NAME.replace("search", "other"))
    for file in beside:
        file.write_bytes(b"x")
    assert state_of(path) is state
    assert inventory.reclaim(path) >= 3 << 16
    assert sorted(shm.iterdir()) == [other]


def test_the_format_of_an_unknown_build_is_recognized_by_its_name_alone(shm: Path) -> None:
    path = make(shm)
    page = checked.encode(inventory._AnyHeader("raftmeta-arena-1"), PAGE)
    with path.open("r+b") as file:
        file.write(page)
    assert state_of(path) is ArenaState.OTHER_FORMAT


@pytest.mark.parametrize("content", [b"", b"short", b"\0" * PAGE, b"something of somebody else " * 1000])
def test_a_file_that_is_no_arena_is_listed_and_left_alone(shm: Path, content: bytes) -> None:
    (shm / NAME).write_bytes(content)
    assert state_of(shm / NAME) is ArenaState.FOREIGN
    assert inventory.reclaim(shm / NAME) == 0
    assert (shm / NAME).read_bytes() == content


def test_links_pipes_and_directories_are_listed_and_left_alone(shm: Path) -> None:
    target = make(shm)
    paths = [shm / f"raftmeta-{kind}.arena" for kind in ("link", "pipe", "directory")]
    paths[0].symlink_to(target)
    os.mkfifo(paths[1])
    paths[2].mkdir()
    for path in paths:
        assert state_of(path) is ArenaState.FOREIGN
        assert inventory.reclaim(path) == 0
        assert path.is_symlink() or path.exists()
    assert inventory.look(shm / "raftmeta-none.arena") is None


def test_an_arena_that_is_being_removed_cannot_be_opened(shm: Path) -> None:
    path = make(shm)
    fd = os.open(path, os.O_RDWR)
    assert mapped.exclude(fd)
    for readonly in (True, False):
        with pytest.raises(FileNotFoundError, match="being removed"):
            Arena.open(path, readonly)
    path.unlink()
    os.close(fd)
    assert inventory.find(shm) == ()


def test_one_that_was_removed_between_opening_and_looking_counts_as_gone(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(shm)
    announce = mapped.announce

    def late(fd: int) -> bool:
        path.unlink()
        return announce(fd)

    monkeypatch.setattr(mapped, "announce", late)
    with pytest.raises(FileNotFoundError):
        Arena.open(path)


def test_arenas_of_this_node_that_its_record_does_not_name_are_abandoned_and_no_others(shm: Path, tmp_path: Path) -> None:
    mine = ArenaUse.of(tmp_path, "n1", "search")
    gone = make(shm, "raftmeta-gone.arena", mine)
    make(shm, "raftmeta-named.arena", mine)
    make(shm, "raftmeta-other-node.arena", ArenaUse.of(tmp_path, "n2", "search"))
    make(shm, "raftmeta-other-store.arena", ArenaUse.of(tmp_path / "other", "n1", "search"))
    used = Arena.create(shm / "raftmeta-used.arena", 1, mine)
    found = inventory.abandoned(shm, tmp_path, "n1", {"raftmeta-named.arena"})
    assert [item.path for item in found] == [gone]
    used.close()


def test_a_longer_path_than_the_header_holds_still_finds_its_own(shm: Path) -> None:
    deep = Path("/" + "/".join(["d" * 200] * 30))
    make(shm, "raftmeta-deep.arena", ArenaUse.of(deep, "n1", "search"))
    assert len(inventory.abandoned(shm, deep, "n1", ())) == 1


def test_the_inventory_runs_without_torch() -> None:
    code = "import sys, node_agent.device.inventory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
