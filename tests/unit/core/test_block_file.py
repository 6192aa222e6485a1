"""The file of block checks in a manifest: what it changes, what it does not, and how it must not be named."""

from __future__ import annotations

import msgspec
import pytest

from consistency import vector
from raftmeta.core import block_file
from raftmeta.core import manifest as m
from raftmeta.core.manifest import FORMAT, FileEntry, Manifest, TensorEntry
from tests.support.commands import digest_of

replace = msgspec.structs.replace
SHA256 = digest_of("blocks")
SIZE = 24 + 16 * (1 + 3 + 0)


def tensor(name: str, begin: int, size: int) -> TensorEntry:
    return TensorEntry(name, "U8", (size,), "model.safetensors", begin, begin + size, digest_of(name), digest_of(f"entry {name}"))


def manifest(*more: FileEntry) -> Manifest:
    files = (
        FileEntry("config.json", 50, digest_of("config"), "config"),
        FileEntry("model.safetensors", 200_000, digest_of("weights"), "weights"),
        *more,
    )
    sizes = {"a": 1, "b": 2 * 65_536 + 1, "c": 0}
    tensors = [tensor(name, begin, size) for (name, size), begin in zip(sizes.items(), (100, 101, 131_174), strict=True)]
    return Manifest(FORMAT, "hf", tuple(sorted(files, key=lambda file: file.name)), tuple(tensors), (), digest_of("root"), ())


def blocks(**changes: object) -> FileEntry:
    return replace(FileEntry(block_file.name_of(SHA256), SIZE, SHA256, "weights"), **changes)


def test_a_sound_manifest_may_name_the_file_and_need_not() -> None:
    assert m.faults(manifest()) == m.faults(manifest(blocks())) == []
    assert block_file.find(manifest()) is None
    assert block_file.find(manifest(blocks())) == blocks()


def test_the_file_is_in_neither_digest_nor_checksum() -> None:
    without, named = manifest(), manifest(blocks())
    assert m.config_digest(named) == m.config_digest(without)
    assert m.weights_digest(named) == m.weights_digest(without)
    assert m.summarize(named, b"").checksum == m.summarize(without, b"").checksum
    assert m.summarize(named, b"").size_bytes == m.summarize(without, b"").size_bytes + SIZE


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (blocks(size_bytes=SIZE - 16), f"block checks of {SIZE} bytes, it has {SIZE - 16}"),
        (blocks(name=f"raftmeta-blocks-{'0' * 16}.wcv"), f"its digest asks for the name {block_file.name_of(SHA256)!r}"),
        (blocks(sha256=digest_of("other")), "its digest asks for the name"),
    ],
)
def test_a_file_that_cannot_be_that_of_these_weights_is_a_fault(wrong: FileEntry, reason: str) -> None:
    (fault,) = m.faults(manifest(wrong))
    assert reason in fault


def test_two_such_files_are_a_fault() -> None:
    other = digest_of("other")
    faults = m.faults(manifest(blocks(), FileEntry(block_file.name_of(other), SIZE, other, "weights")))
    assert len(faults) == 1 and "2 files of block checks" in faults[0]


def test_a_tensor_cannot_lie_in_the_file() -> None:
    sound = manifest(blocks())
    first = replace(sound.tensors[0], file=blocks().name, begin=0, end=1)
    (fault,) = m.faults(replace(sound, tensors=(first, *sound.tensors[1:])))
    assert "a tensor is said to lie in it" in fault


def test_a_file_of_that_name_with_another_role_is_a_file_as_every_other() -> None:
    plain = manifest(blocks(role="other"))
    assert m.faults(plain) == []
    assert block_file.find(plain) is None
    assert m.config_digest(plain) != m.config_digest(manifest())


def test_a_block_here_is_a_block_of_the_vector() -> None:
    assert block_file.BLOCK_BYTES == vector.BLOCK_BYTES
    assert len(vector.pack_blocks(vector.block_checks(b"x"))) == block_file.CHECK_BYTES
