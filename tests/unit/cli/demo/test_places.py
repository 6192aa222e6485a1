"""The demo's directories: its own, checked for room, and gone afterwards; logs stay when it stopped early."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raftmeta.cli.demo import places
from raftmeta.cli.demo.command import find_source, model_name
from raftmeta.cli.exits import UsageFault


def test_a_temporary_directory_goes_with_everything_in_it() -> None:
    with places.work_directory(None, 0) as path:
        (path / "logs").mkdir()
        (path / "cluster").mkdir()
    assert not path.exists()


def test_a_demo_that_stopped_leaves_its_logs_and_nothing_else() -> None:
    with places.work_directory(None, 0) as path:
        for name in ("logs", "cluster", "versions"):
            (path / name).mkdir()
        (path / places.STOPPED).write_text("why")
    try:
        assert sorted(child.name for child in path.iterdir()) == ["logs", "stopped"]
    finally:
        (path / "stopped").unlink()
        (path / "logs").rmdir()
        path.rmdir()


def test_a_named_directory_must_be_new_and_stays(tmp_path: Path) -> None:
    with places.work_directory(tmp_path / "a" / "b", 0) as path:
        (path / "file").touch()
    assert (path / "file").exists()
    with pytest.raises(UsageFault, match="not an empty directory"), places.work_directory(path, 0):
        pass
    with pytest.raises(UsageFault, match="not an empty directory"), places.work_directory(path / "file", 0):
        pass


def test_too_little_room_is_told_with_both_figures(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match=r"has .* free, the demo needs"), places.work_directory(tmp_path / "x", 1 << 60):
        pass


def test_arenas_lie_in_memory_where_it_has_room_and_beside_the_rest_where_it_has_not(tmp_path: Path) -> None:
    memory, work = tmp_path / "shm", tmp_path / "work"
    memory.mkdir()
    work.mkdir()
    with places.arena_directory(work, 1, memory) as path:
        assert path.parent == memory
    assert not path.exists()
    with places.arena_directory(work, 1 << 60, memory) as path:
        assert path.parent == work
    assert not path.exists()
    with places.arena_directory(work, 1, tmp_path / "missing") as path:
        assert path.parent == work


def test_what_a_killed_demo_left_in_memory_is_swept_and_nothing_else(tmp_path: Path) -> None:
    gone, alive, foreign = (tmp_path / name for name in ("raftmeta-demo-4194305-x", f"raftmeta-demo-{os.getpid()}-x", "raftmeta-node-a"))
    for path in (gone, alive, foreign):
        path.mkdir()
    places.sweep(tmp_path)
    assert [path.exists() for path in (gone, alive, foreign)] == [False, True, True]


@pytest.mark.parametrize(
    ("name", "model"), [("All-MiniLM L6", "all-minilm-l6"), ("..", "model"), ("größe", "gr--e"), ("a" * 200, "a" * 128)]
)
def test_a_models_name_is_its_directorys_in_the_allowed_alphabet(name: str, model: str) -> None:
    assert model_name(Path("/x") / name) == model


def test_a_directory_that_holds_no_model_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match=r"holds no config.json"):
        find_source(tmp_path)
    (tmp_path / "config.json").touch()
    with pytest.raises(UsageFault, match=r"holds no \*.safetensors"):
        find_source(tmp_path)
