"""`raftmeta vector`: entries, root and block checks of files, and what is refused."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from consistency import artifact_files, block_sidecar, vector, vector_command, vector_files
from consistency.artifact import build_manifest
from raftmeta.cli.main import main
from raftmeta.core import block_file
from tests.support.weights import file_bytes, safetensors_bytes, tiny_tensors, write_model

EMPTY_ROOT = "8a7be6975dec669ecf9fd48f0275f532a114b595a879623202a1c7508a1a8708"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def seen(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    code = main(["vector", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_entries_and_root_are_those_of_a_manifest_of_the_directory(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = build_manifest(root, sources=[], engine="hf", unbound=())
    for target in (root, root / "model.safetensors"):
        code, found = seen(capsys, str(target))
        assert (code, found["root"]) == (0, manifest.vector_root)
        rows = [(row["name"], row["dtype"], tuple(row["shape"]), row["size_bytes"], row["entry"]) for row in found["tensors"]]
        assert rows == [(t.name, t.dtype, t.shape, t.size_bytes, t.entry) for t in manifest.tensors]
        assert found["size_bytes"] == sum(tensor.size_bytes for tensor in manifest.tensors)


@pytest.mark.parametrize("threads", ["2", "5"])
def test_threads_and_pieces_change_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, threads: str
) -> None:
    data = os.urandom(40 * vector.BLOCK_BYTES + 13)
    path = tmp_path / "w.safetensors"
    path.write_bytes(safetensors_bytes({"w": ("U8", (len(data),), data), "x": ("U8", (3,), b"abc")}))
    monkeypatch.setattr(vector_files, "PIECE_BYTES", 20 * vector.BLOCK_BYTES)
    found = [seen(capsys, str(path), "--threads", n)[1] for n in ("1", threads)]
    assert found[0] == found[1]
    assert found[0]["tensors"][0]["entry"] == vector.tensor_entry(data, "U8", (len(data),)).entry


def test_shards_make_one_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b.safetensors").write_bytes(safetensors_bytes({"a": ("U8", (1,), b"x")}))
    (tmp_path / "a.safetensors").write_bytes(safetensors_bytes({"b": ("U8", (2,), b"yz")}))
    (tmp_path / "notes.txt").write_text("not looked at")
    _, found = seen(capsys, str(tmp_path))
    assert [(row["name"], row["file"]) for row in found["tensors"]] == [("a", "b.safetensors"), ("b", "a.safetensors")]
    assert found["root"] == vector.root({row["name"]: row["entry"] for row in found["tensors"]})


def test_the_last_line_is_the_root_and_the_columns_are_aligned(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vector", str(root)]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    _, found = seen(capsys, str(root))
    assert last == f"root      {found['root']}"
    assert table[0].split() == ["TENSOR", "DTYPE", "SHAPE", "BYTES", "ENTRY"]
    assert len(table) == 1 + len(found["tensors"])
    entries = {row.index(item["entry"]) for row, item in zip(table[1:], found["tensors"], strict=True)}
    assert entries == {table[0].index("ENTRY")}
    end = table[0].index("BYTES") + len("BYTES")
    assert all(row[:end].endswith(f" {item['size_bytes']}") for row, item in zip(table[1:], found["tensors"], strict=True))


def test_a_narrow_terminal_gets_short_entries_then_short_names_and_whole_figures() -> None:
    assert vector_command.fitted([20, 5, 8, 10, 64], 160) == [20, 5, 8, 10, 64]
    assert vector_command.fitted([20, 5, 8, 10, 64], 80) == [20, 5, 8, 10, 16]
    assert vector_command.fitted([49, 5, 9, 10, 64], 80) == [32, 5, 9, 10, 16]
    assert vector_command.fitted([49, 5, 9, 10, 64], 10) == [20, 5, 9, 10, 16]
    assert vector_command.fitted([5, 10, 16, 16], 80) == [5, 10, 16, 16]


def test_a_name_that_is_too_long_loses_its_middle() -> None:
    assert vector_command._cell("TENSOR", "encoder.layer.4.attention.self.query.weight", 20) == "encoder…query.weight"
    assert vector_command._cell("ENTRY", "0123456789", 4) == "012…"
    assert vector_command._cell("BYTES", "12", 4) == "  12"


def test_a_file_without_tensors_has_the_empty_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "w.safetensors").write_bytes(file_bytes({}, b""))
    assert seen(capsys, str(tmp_path))[1] == {"root": EMPTY_ROOT, "expected": None, "size_bytes": 0, "tensors": [], "blocks": None}


def test_the_expected_root_is_a_yes_in_either_case_of_letters(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = build_manifest(root, sources=[], engine="hf", unbound=()).vector_root
    assert main(["vector", str(root), "--expect", expected.upper()]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"root      {expected}  as expected"
    assert main(["vector", str(root), "--expect", expected[:12]]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"root      {expected}  as expected"
    assert main(["vector", str(root), "--expect", "0" * 12]) == 1


def test_another_root_is_a_no_that_shows_both(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = build_manifest(root, sources=[], engine="hf", unbound=()).vector_root
    assert main(["vector", str(root), "--expect", EMPTY_ROOT]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [f"expected  {EMPTY_ROOT}", f"root      {found}"]
    code, answer = seen(capsys, str(root), "--expect", EMPTY_ROOT)
    assert (code, answer["root"], answer["expected"]) == (1, found, EMPTY_ROOT)


def test_the_block_checks_of_one_tensor(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dtype, shape, data = tiny_tensors()["big"]
    expected = vector.tensor_entry(data, dtype, shape)
    assert main(["vector", str(root), "--blocks", "big"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[1:-1]]
    assert rows == [[str(n), str(n * 65_536), f"{a:016x}", f"{b:016x}"] for n, (a, b) in enumerate(expected.blocks.tolist())]
    assert lines[-1] == f"entry     {expected.entry}"
    _, found = seen(capsys, str(root / "model.safetensors"), "--blocks", "big")
    assert [[int(pair["a"], 16), int(pair["b"], 16)] for pair in found["blocks"]] == expected.blocks.tolist()
    assert seen(capsys, str(root), "--blocks", "empty")[1]["blocks"] == []


def test_only_the_asked_tensor_is_read(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(vector_command._Told, "__call__", lambda self, count: read.append(count))
    assert main(["vector", str(root), "--blocks", "last.weight"]) == 0
    assert sum(read) == 24


def test_a_tensor_that_there_is_not_gets_the_nearest(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vector", str(root), "--blocks", "last.weigth"]) == 3
    assert "no tensor is called 'last.weigth'; did you mean 'last.weight'? (not_found)" in capsys.readouterr().err


def test_block_checks_are_written_as_publish_names_them(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = seen(capsys, str(root), "--write-blocks")
    (path,) = root.glob("*.wcv")
    assert (code, found["blocks"]["name"]) == (0, path.name)
    manifest = block_sidecar.naming(build_manifest(root, sources=[], engine="hf", unbound=()), path.read_bytes())
    named = block_file.find(manifest)
    assert named is not None and (named.name, named.size_bytes, named.sha256) == tuple(found["blocks"].values())
    block_sidecar.judge(path, manifest)
    assert main(["vector", str(root), "--write-blocks"]) == 0
    assert f"blocks    {path.name}" in capsys.readouterr().out


BAD = {
    "cut": file_bytes({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}, bytes(8)),
    "wrong size": file_bytes({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, bytes(8)),
    "twice": file_bytes('{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
    "trailing": file_bytes({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"xy"),
    "empty": b"",
    "no header": b"\x10\0\0\0\0\0\0\0not json at all!",
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_bad_file_is_no_answer_and_no_other_root(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(BAD[name])
    for target in (path, tmp_path):
        assert main(["vector", str(target), "--expect", EMPTY_ROOT]) == 3
        captured = capsys.readouterr()
        assert captured.out == "" and "'w.safetensors'" in captured.err and "(bad_manifest)" in captured.err
        code, answer = seen(capsys, str(target), "--expect", EMPTY_ROOT)
        assert (code, answer["error"]["code"], answer["error"]["exit"]) == (3, "bad_manifest", 3)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(safetensors_bytes({"w": ("U8", (1,), b"x")}))
    assert main(["vector", str(tmp_path)]) == 3
    assert "tensor 'w' stands in 'a.safetensors' and in 'b.safetensors'" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["nothing", "pipe", "loop", "directory without weights"])
def test_what_holds_no_weights_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    target = tmp_path / "target"
    if what == "pipe":
        os.mkfifo(target)
    elif what == "loop":
        target.symlink_to(target)
    elif what == "directory without weights":
        target.mkdir()
    assert main(["vector", str(target)]) == 3
    captured = capsys.readouterr()
    assert captured.out == "" and "target" in captured.err and "hint:" in captured.err


def test_a_file_that_changes_while_it_is_read_is_refused(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(self: object, count: int) -> None:
        with (root / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"?")

    monkeypatch.setattr(vector_command._Told, "__call__", told)
    assert main(["vector", str(root)]) == 3
    assert "changed while it was read" in capsys.readouterr().err


def test_a_disk_that_fails_is_no_answer(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(artifact_files.FileIO):
        def readinto(self, buffer: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(artifact_files, "FileIO", Failing)
    assert main(["vector", str(root), "--expect", EMPTY_ROOT]) == 3
    assert "'model.safetensors' cannot be read: Input/output error" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--expect", "123"],
        ["--expect", "g" * 64],
        ["--blocks", "big", "--expect", EMPTY_ROOT],
        ["--blocks", "big", "--write-blocks"],
        ["--threads", "0"],
        ["--threads", "257"],
        ["--thread", "2"],
    ],
)
def test_a_wrong_command_line_exits_3_before_anything_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["vector", str(tmp_path / "not there"), *words]) == 3
    assert "not there" not in capsys.readouterr().err


def test_block_checks_are_written_into_directories_alone(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vector", str(root / "model.safetensors"), "--write-blocks"]) == 3
    assert "--write-blocks asks for a directory" in capsys.readouterr().err
    assert not list(root.glob("*.wcv"))
