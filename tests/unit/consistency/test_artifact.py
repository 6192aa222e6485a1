"""Manifests of directories: what they hold, what is skipped with a reason, and everything that is refused."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from consistency import vector
from consistency.artifact import Hooks, Progress, build_manifest
from consistency.artifact_files import Skipped, list_files, role_of
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import Manifest, faults, pack, unpack
from tests.support.weights import file_bytes, safetensors_bytes, tiny_tensors, write_model


def build(root: Path, unbound: Sequence[str] | None = (), hooks: Hooks | None = None) -> Manifest:
    return build_manifest(root, sources=["file:///models/tiny/"], engine="hf", unbound=unbound, hooks=hooks)


def refusal(root: Path, hooks: Hooks | None = None) -> RaftmetaError:
    with pytest.raises(RaftmetaError) as caught:
        build(root, hooks=hooks)
    assert caught.value.code == "bad_manifest"
    return caught.value


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = write_model(tmp_path / "model")
    for path in made.rglob("*"):  # written long ago, so that any write during a test is a visible one
        os.utime(path, ns=(10**18, 10**18))
    return made


def test_every_file_and_tensor_is_named_with_its_digests(root: Path) -> None:
    manifest = build(root)
    assert [(file.name, file.role) for file in manifest.files] == [
        ("README.md", "other"),
        ("config.json", "config"),
        ("model.safetensors", "weights"),
        ("tokenizer.json", "tokenizer"),
    ]
    for file in manifest.files:
        content = (root / file.name).read_bytes()
        assert (file.size_bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    content = (root / "model.safetensors").read_bytes()
    tensors = tiny_tensors()
    assert [tensor.name for tensor in manifest.tensors] == sorted(tensors)
    for tensor in manifest.tensors:
        dtype, shape, data = tensors[tensor.name]
        assert content[tensor.begin : tensor.end] == data
        assert tensor.sha256 == hashlib.sha256(data).hexdigest()
        assert tensor.entry == vector.tensor_entry(data, dtype, shape).entry
    assert manifest.vector_root == vector.root({tensor.name: tensor.entry for tensor in manifest.tensors})
    assert faults(manifest) == []
    assert unpack(pack(manifest)) == manifest


def test_the_same_directory_gives_the_same_bytes_twice(root: Path) -> None:
    assert pack(build(root)) == pack(build(root))


def test_a_tensor_larger_than_a_read_gets_the_digests_of_its_bytes(tmp_path: Path) -> None:
    size = (9 << 20) + 5
    data = hashlib.shake_128(b"large").digest(size)
    root = write_model(tmp_path / "model", {"small": ("U8", (3,), b"abc"), "large": ("U8", (size,), data)})
    large = build(root).tensors[0]
    assert (large.name, large.sha256) == ("large", hashlib.sha256(data).hexdigest())
    assert large.entry == vector.tensor_entry(data, "U8", (size,)).entry


def test_progress_counts_every_byte_once(root: Path) -> None:
    seen: list[Progress] = []
    build(root, hooks=Hooks(progress=seen.append))
    total = sum(path.stat().st_size for path in root.iterdir())
    assert [step.done_bytes for step in seen] == sorted(step.done_bytes for step in seen)
    assert (seen[-1].done_bytes, seen[-1].total_bytes) == (total, total)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model-00001-of-00002.safetensors", "weights"),
        ("config.json", "config"),
        ("generation_config.json", "config"),
        ("1_Pooling/config.json", "config"),
        ("model.safetensors.index.json", "config"),
        ("tokenizer_config.json", "tokenizer"),
        ("vocab.txt", "tokenizer"),
        ("special_tokens_map.json", "tokenizer"),
        ("LICENSE", "other"),
        ("modeling_tiny.py", "other"),
    ],
)
def test_roles_follow_from_names(name: str, role: str) -> None:
    assert role_of(name) == role


# Sharded models.


def sharded(root: Path, weight_map: dict[str, str] | None = None) -> Path:
    write_model(root)
    (root / "model.safetensors").unlink()
    (root / "a.safetensors").write_bytes(safetensors_bytes({"one": ("U8", (2,), b"xy")}))
    (root / "b.safetensors").write_bytes(safetensors_bytes({"two": ("U8", (1,), b"z")}))
    index = {"metadata": {"total_size": 3}, "weight_map": weight_map or {"one": "a.safetensors", "two": "b.safetensors"}}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return root


def test_shards_make_one_version(tmp_path: Path) -> None:
    manifest = build(sharded(tmp_path / "model"))
    assert [(tensor.name, tensor.file) for tensor in manifest.tensors] == [("one", "a.safetensors"), ("two", "b.safetensors")]


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"one": "b.safetensors", "two": "b.safetensors"}, "places tensor 'one' in 'b.safetensors', the shards hold it in 'no file'"),
        ({"one": "a.safetensors", "two": "b.safetensors", "three": "b.safetensors"}, "places tensor 'three'"),
        ({"two": "b.safetensors", "one": "c.safetensors"}, "places tensor 'one' in 'c.safetensors'"),
    ],
)
def test_an_index_that_contradicts_its_shards_is_refused(tmp_path: Path, weight_map: dict[str, str], reason: str) -> None:
    assert reason in refusal(sharded(tmp_path / "model", weight_map)).detail


def test_an_index_that_leaves_a_tensor_out_is_refused(tmp_path: Path) -> None:
    root = sharded(tmp_path / "model")
    (root / "b.safetensors").write_bytes(safetensors_bytes({"two": ("U8", (1,), b"z"), "more": ("U8", (1,), b"z")}))
    assert "places tensor 'more' in 'no file', the shards hold it in 'b.safetensors'" in refusal(root).detail


@pytest.mark.parametrize("content", [b"[]", b"{}", b"{", b"\xff", b'{"weight_map": []}', b'{"weight_map": {"one": 5}}'])
def test_an_unreadable_index_is_refused(tmp_path: Path, content: bytes) -> None:
    root = sharded(tmp_path / "model")
    (root / "model.safetensors.index.json").write_bytes(content)
    assert "holds no readable weight_map" in refusal(root).detail


def test_a_tensor_that_stands_in_two_files_is_refused(root: Path) -> None:
    (root / "copy.safetensors").write_bytes((root / "model.safetensors").read_bytes())
    assert "stands in 'copy.safetensors' and in 'model.safetensors'" in refusal(root).detail


# What is left out, and what may not be there.


def test_what_is_left_out_is_reported_with_a_reason(root: Path) -> None:
    (root / ".git").mkdir()
    (root / ".gitattributes").write_text("x")
    (root / "__pycache__").mkdir()
    (root / "pytorch_model.bin").write_bytes(b"x")
    (root / "model.onnx").write_bytes(b"x")
    (root / "loop").symlink_to(root)
    skipped: list[Skipped] = []
    manifest = build(root, hooks=Hooks(skipped=skipped.append))
    assert len(manifest.files) == 4
    assert {item.name: item.reason.split()[0] for item in skipped} == {
        ".git": "hidden",
        ".gitattributes": "hidden",
        "__pycache__": "byte",
        "loop": "link",
        "model.onnx": "weights",
        "pytorch_model.bin": "pickled",
    }


def test_pickles_in_place_of_weights_are_refused(root: Path) -> None:
    (root / "model.safetensors").rename(root / "pytorch_model.bin")
    assert "'pytorch_model.bin' is a pickle" in refusal(root).detail


def test_weights_of_another_format_alone_are_named_as_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"x")
    detail = refusal(tmp_path).detail
    assert "expected at least one, found model.gguf (weights of another format; only *.safetensors is served)" in detail


def test_a_directory_without_weights_is_refused(root: Path) -> None:
    (root / "model.safetensors").unlink()
    assert "holds no *.safetensors: expected at least one, found README.md, config.json, tokenizer.json" in refusal(root).detail


def test_of_many_files_a_few_are_named(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02d}.txt").write_text("x")
    assert refusal(tmp_path).detail.endswith("found 00.txt, 01.txt, 02.txt, 03.txt, 04.txt, 05.txt, 14 more")


def test_an_empty_directory_is_said_to_hold_nothing(tmp_path: Path) -> None:
    assert refusal(tmp_path).detail == f"{str(tmp_path)!r} holds no *.safetensors: expected at least one, found no file"


def test_an_engine_without_its_config_is_refused(root: Path) -> None:
    (root / "config.json").unlink()
    expected = f"'config.json' is missing in {str(root)!r}; the engine 'hf' cannot bind without it: "
    assert refusal(root).detail == expected + "found README.md, model.safetensors, tokenizer.json"
    assert build_manifest(root, sources=[], engine="plain", unbound=()).engine == "plain"


def test_a_directory_below_without_weights_is_not_named(root: Path) -> None:
    pooling = root / "1_Pooling"
    pooling.mkdir()
    (pooling / "config.json").write_text("{}")
    assert refusal(root.parent).detail.endswith(f"it stands in {str(root)!r}: publish that directory")


def test_the_directory_above_that_of_the_model_is_refused_and_the_right_one_named(root: Path) -> None:
    assert refusal(root.parent).detail.endswith(f"it stands in {str(root)!r}: publish that directory")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing", "is no directory: No such file or directory; expected the directory of a model, which holds *.safetensors"),
        ("file", "is no directory but a file; expected"),
        ("w.safetensors", "its configuration, for instance /"),
        ("file/x", "is no directory: Not a directory"),
    ],
)
def test_a_root_that_is_no_directory_is_refused(tmp_path: Path, name: str, says: str) -> None:
    for file in ("file", "w.safetensors"):
        (tmp_path / file).write_text("x")
    with pytest.raises(RaftmetaError) as caught:
        build(tmp_path / name)
    assert caught.value.code == "bad_field" and f"{tmp_path / name} is no directory" in caught.value.detail
    assert says in caught.value.detail


def test_a_directory_that_cannot_be_listed_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scandir(path: Path) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", scandir)  # whoever runs the tests may be allowed everything
    assert refusal(root).detail == f"the directory {str(root)!r} cannot be listed: Permission denied"


def test_the_root_may_be_reached_through_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(root)
    assert build(tmp_path / "current") == build(root)


def test_a_link_to_a_file_of_the_artifact_counts_as_that_file(root: Path) -> None:
    (root / "vocab.txt").symlink_to("README.md")
    assert {file.name: file.sha256 for file in build(root).files}["vocab.txt"] == hashlib.sha256(b"A model.\n").hexdigest()


def outside_file(root: Path) -> None:
    (root.parent / "secret").write_text("x")
    (root / "notes.txt").symlink_to("../secret")


def outside_directory(root: Path) -> None:
    (root.parent / "elsewhere").mkdir()
    (root / "sub").symlink_to(root.parent / "elsewhere")


def dangling(root: Path) -> None:
    (root / "notes.txt").symlink_to("nothing")


def endless(root: Path) -> None:
    (root / "notes.txt").symlink_to("notes.txt")


def pipe(root: Path) -> None:
    os.mkfifo(root / "pipe.json")


def deep(root: Path) -> None:
    (root / "/".join("d" * 17)).mkdir(parents=True)


def backslash(root: Path) -> None:
    (root / "a\\b").write_text("x")


def newline(root: Path) -> None:
    (root / "a\nb").write_text("x")


def no_unicode(root: Path) -> None:
    (root / os.fsdecode(b"a\xff")).write_text("x")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (outside_file, "'notes.txt' is a link that leaves the artifact root"),
        (outside_directory, "'sub' is a link that leaves the artifact root"),
        (dangling, "'notes.txt' is a link that leads nowhere"),
        (endless, "'notes.txt' is a link that leads nowhere"),
        (pipe, "'pipe.json' is no regular file"),
        (deep, "more than 16 directories deep"),
        (backslash, "holds a control character or a backslash"),
        (newline, "holds a control character or a backslash"),
        (no_unicode, "is no valid UTF-8"),
    ],
)
def test_what_could_lead_outside_or_surprise_is_refused(root: Path, spoil: Callable[[Path], None], reason: str) -> None:
    spoil(root)
    assert reason in refusal(root).detail


def test_a_header_that_fails_the_gate_names_its_file(root: Path) -> None:
    header = {"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}
    (root / "model.safetensors").write_bytes(file_bytes(header, bytes(8)))
    error = refusal(root)
    assert error.detail.startswith("'model.safetensors': tensor 'w'")
    assert error.params == {"file": "model.safetensors", "tensor": "w", "expected": "12 bytes", "found": "8 bytes"}


@pytest.mark.parametrize("content", [b"", b"\x10\0", bytes(8), b"\xff" * 8])
def test_a_file_that_is_no_safetensors_file_is_refused(root: Path, content: bytes) -> None:
    (root / "model.safetensors").write_bytes(content)
    assert "'model.safetensors': the" in refusal(root).detail


# Unbound tensors.


def test_unbound_names_are_asked_for_when_they_are_not_given(root: Path) -> None:
    asked: list[tuple[Path, list[str]]] = []

    def find(where: Path, names: Sequence[str]) -> set[str]:
        asked.append((where, list(names)))
        return {"scalar", "flag"}

    assert build(root, unbound=None, hooks=Hooks(find_unbound=find)).unbound == ("flag", "scalar")
    assert asked == [(root.resolve(), sorted(tiny_tensors()))]
    assert build(root, unbound=["big"], hooks=Hooks(find_unbound=find)).unbound == ("big",)
    assert len(asked) == 1


def test_unbound_names_that_nobody_can_find_out_are_refused(root: Path) -> None:
    with pytest.raises(RaftmetaError, match="unbound tensors are not known") as caught:
        build(root, unbound=None)
    assert caught.value.code == "bad_field"


def test_an_unbound_name_that_is_no_tensor_is_refused(root: Path) -> None:
    with pytest.raises(RaftmetaError, match="unbound names 'nothing'"):
        build(root, unbound=["nothing"])


def test_a_source_that_is_no_url_is_refused(root: Path) -> None:
    with pytest.raises(RaftmetaError, match="source 'ftp://x/' is not a file, http, https or s3 URL"):
        build_manifest(root, sources=["ftp://x/"], engine="hf", unbound=())


# Files that change while they are read. The progress hook is called between two reads.


def append(root: Path) -> None:
    with (root / "model.safetensors").open("ab") as file:
        file.write(b"x")


def cut(root: Path) -> None:
    os.truncate(root / "model.safetensors", 5_000_000)


def overwrite(root: Path) -> None:
    with (root / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")


def overwrite_and_restore_the_time(root: Path) -> None:
    overwrite(root)
    os.utime(root / "model.safetensors", ns=(10**18, 10**18))


def replace(root: Path) -> None:
    copy = root.parent / "copy"
    copy.write_bytes((root / "model.safetensors").read_bytes())
    os.utime(copy, ns=(10**18, 10**18))
    copy.replace(root / "model.safetensors")


def remove(root: Path) -> None:
    (root / "model.safetensors").unlink()


def add(root: Path) -> None:
    (root / "late.json").write_text("{}")


def change_what_was_read(root: Path) -> None:
    (root / "config.json").write_text("{ }")


def replace_what_was_not_read_by_a_link_outside(root: Path) -> None:
    (root.parent / "secret").write_text("{}")
    (root / "tokenizer.json").unlink()
    (root / "tokenizer.json").symlink_to("../secret")


def replace_what_was_not_read_by_a_pipe(root: Path) -> None:
    (root / "tokenizer.json").unlink()
    os.mkfifo(root / "tokenizer.json")


def replace_what_was_not_read_by_a_file(root: Path) -> None:
    (root / "tokenizer.json").unlink()
    (root / "tokenizer.json").write_text("{}")


# What is refused at once, before more is read, and what only the second look at the directory can see.
CHANGES = [
    (append, "'model.safetensors' changed while it was read: expected"),
    (cut, "'model.safetensors' changed while it was read"),
    (overwrite, "'model.safetensors' changed while it was read: expected"),
    (overwrite_and_restore_the_time, "'model.safetensors' changed while it was read: expected"),
    (replace, "'model.safetensors' changed while it was read: expected"),
    (remove, "'model.safetensors' changed while it was read: No such file"),
    (add, "'late.json' was added, removed or written"),
    (change_what_was_read, "'config.json' was added, removed or written"),
    (replace_what_was_not_read_by_a_file, "'tokenizer.json' was replaced after the directory was listed"),
    (replace_what_was_not_read_by_a_link_outside, "'tokenizer.json' cannot be opened"),
    (replace_what_was_not_read_by_a_pipe, "'tokenizer.json' was replaced after the directory was listed"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES)
def test_a_change_while_reading_is_refused(tmp_path: Path, change: Callable[[Path], None], reason: str) -> None:
    size = 10 << 20
    root = write_model(tmp_path / "model", {"w": ("U8", (size,), bytes(size))})
    for path in root.iterdir():
        os.utime(path, ns=(10**18, 10**18))
    _let_a_tick_pass(root / "model.safetensors", tmp_path / "clock")
    steps: list[Progress] = []

    def meddle(step: Progress) -> None:
        if step.file == "model.safetensors":
            steps.append(step)
            if len(steps) == 2:
                change(root)

    assert refusal(root, Hooks(progress=meddle)).detail.startswith(reason)


def test_the_model_of_the_changes_passes_without_a_change(tmp_path: Path) -> None:
    size = 10 << 20
    assert len(build(write_model(tmp_path / "model", {"w": ("U8", (size,), bytes(size))})).tensors) == 1


def test_a_directory_of_the_path_that_becomes_a_link_is_refused(tmp_path: Path) -> None:
    root = write_model(tmp_path / "model")
    (root / "sub").mkdir()
    (root / "sub" / "config.json").write_text("{}")
    (root / "z").mkdir()

    def meddle(step: Progress) -> None:
        if step.file == "model.safetensors" and (root / "sub").is_dir() and not (root / "sub").is_symlink():
            (root / "sub").rename(tmp_path / "moved")
            (root / "sub").symlink_to(tmp_path / "moved")

    assert "'sub/config.json' was replaced" in refusal(root, Hooks(progress=meddle)).detail


def _let_a_tick_pass(file: Path, clock: Path) -> None:
    """Until the kernel's coarse file clock has moved on from the file's last change."""
    for _ in range(100_000):
        clock.write_text("x")
        if clock.stat().st_ctime_ns > file.stat().st_ctime_ns:
            return
    raise AssertionError("the file clock stands still")


def test_listing_more_files_than_a_manifest_holds_is_refused(root: Path) -> None:
    assert len(list_files(root, max_files=4).files) == 4
    with pytest.raises(RaftmetaError, match="holds more than 3 files"):
        list_files(root, max_files=3)
