"""Where the file of block checks goes, and when a manifest may name it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from consistency import block_placing, block_sidecar
from consistency.artifact import Artifact, Hooks, read_artifact
from consistency.artifact_files import Skipped, Stamp
from raftmeta.core import block_file
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import faults, pack
from tests.support.weights import write_model

ELSEWHERE = "https://store.example/tiny/"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny model")


def read(root: Path, *sources: str, hooks: Hooks | None = None) -> Artifact:
    return read_artifact(root, sources=sources or [root.as_uri() + "/"], engine="hf", unbound=(), hooks=hooks)


def written(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if "raftmeta-blocks" in path.name)


def test_the_file_lies_in_a_directory_that_is_a_source_and_is_named(root: Path) -> None:
    artifact = read(root)
    placed = block_placing.place(root, artifact, None)
    assert placed.file is not None
    assert written(root) == [placed.file.name]
    assert (root / placed.file.name).read_bytes() == artifact.blocks
    assert block_file.find(placed.manifest) == placed.file
    assert faults(placed.manifest) == []
    block_sidecar.judge(root / placed.file.name, placed.manifest)


def test_whoever_may_read_the_weights_may_read_the_file(root: Path) -> None:
    placed = block_placing.place(root, read(root), None)
    assert placed.file is not None
    assert (root / placed.file.name).stat().st_mode == (root / "model.safetensors").stat().st_mode


def test_publishing_again_gives_the_same_manifest_and_leaves_the_file_alone(root: Path) -> None:
    first = block_placing.place(root, read(root), None)
    assert first.file is not None
    before = Stamp.of((root / first.file.name).stat())
    again = block_placing.place(root, read(root), None)
    assert pack(again.manifest) == pack(first.manifest)
    assert Stamp.of((root / first.file.name).stat()) == before


def test_a_file_with_other_bytes_under_its_name_is_replaced(root: Path) -> None:
    artifact = read(root)
    path = root / block_sidecar.entry_of(artifact.blocks).name
    path.write_bytes(b"cut")
    block_placing.place(root, artifact, None)
    assert path.read_bytes() == artifact.blocks


def test_what_a_publisher_left_that_died_is_in_nobodys_way(root: Path) -> None:
    artifact = read(root)
    name = block_sidecar.entry_of(artifact.blocks).name
    (root / f".{name}.{os.getpid()}.new").write_bytes(b"half")
    block_placing.write(root, artifact.blocks)
    assert written(root) == [name]


def test_the_file_of_other_weights_is_left_out_and_told_and_the_own_one_is_not(root: Path) -> None:
    old = block_placing.place(root, read(root), None).file
    assert old is not None
    write_model(root, {"w": ("U8", (3,), b"abc")})
    new = block_placing.place(root, read(root), None).file
    assert new is not None
    told: list[Skipped] = []
    artifact = read(root, hooks=Hooks(skipped=told.append))
    assert told == [Skipped(old.name, "block checks of other weights")]
    assert not any("raftmeta-blocks" in file.name for file in artifact.manifest.files)


def test_sources_elsewhere_get_the_file_only_if_a_copy_of_the_directory_has_it(root: Path) -> None:
    placed = block_placing.place(root, read(root, ELSEWHERE), None)
    assert (placed.file, written(root)) == (None, [])
    assert "raftmeta vector DIR --write-blocks" in placed.note
    assert block_file.find(placed.manifest) is None
    block_placing.write(root, read(root).blocks)
    named = block_placing.place(root, read(root, ELSEWHERE), None)
    assert named.file is not None and [named.file.name] == written(root)


def test_a_damaged_file_in_the_directory_does_not_count_as_copied(root: Path) -> None:
    artifact = read(root, ELSEWHERE)
    (root / block_sidecar.entry_of(artifact.blocks).name).write_bytes(artifact.blocks[:-1])
    assert block_placing.place(root, artifact, None).file is None


def test_one_source_among_others_is_enough_and_the_publisher_is_told_what_they_need(root: Path) -> None:
    placed = block_placing.place(root, read(root, ELSEWHERE, root.as_uri() + "/"), None)
    assert placed.file is not None and placed.note == "copies of DIR should have it, too"


def test_it_can_be_insisted_on_and_refused(root: Path) -> None:
    assert block_placing.place(root, read(root), False).file is None
    assert written(root) == []
    assert block_placing.place(root, read(root, ELSEWHERE), True).file is not None


def fail(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The system refuses to make new files, as a read-only mount or a full disk does; root ignores permissions."""
    plain = os.open

    def refused(path: str | os.PathLike[str], flags: int, *rest: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number), str(path))
        return plain(path, flags, *rest)

    monkeypatch.setattr(os, "open", refused)


def test_a_directory_that_cannot_be_written_is_published_without_unless_insisted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, errno.EROFS)
    artifact = read(root)
    placed = block_placing.place(root, artifact, None)
    assert placed.file is None and placed.note.endswith("cannot be written: Read-only file system")
    assert placed.manifest == artifact.manifest
    with pytest.raises(RaftmetaError, match="Read-only file system") as caught:
        block_placing.place(root, artifact, True)
    assert caught.value.code == "bad_field"


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, "disk_full"), (errno.EIO, "internal")])
def test_another_failure_to_write_ends_the_publish_and_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: str
) -> None:
    fail(monkeypatch, number)
    with pytest.raises(RaftmetaError) as caught:
        block_placing.place(root, read(root), None)
    assert caught.value.code == code
    assert written(root) == []


@pytest.mark.parametrize("wanted", [None, True])
def test_a_directory_in_the_place_of_the_file_is_told_and_nothing_is_changed(root: Path, wanted: bool | None) -> None:
    artifact = read(root)
    in_its_place = root / block_sidecar.entry_of(artifact.blocks).name
    in_its_place.mkdir()
    if wanted:
        with pytest.raises(RaftmetaError, match="cannot be written") as caught:
            block_placing.place(root, artifact, wanted)
        assert caught.value.code == "bad_field"
    else:
        placed = block_placing.place(root, artifact, wanted)
        assert placed.file is None and "cannot be written" in placed.note
    assert block_placing.place(root, read(root, ELSEWHERE), None).file is None
    assert written(root) == [in_its_place.name] and in_its_place.is_dir()
