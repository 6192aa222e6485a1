"""The file of block checks: its bytes, reading it, and that no damage of it is believed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency import block_sidecar, vector
from raftmeta.core import block_file
from raftmeta.core import manifest as manifests
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import Manifest
from tests.support import wcv_reference
from tests.support.versions import manifest_of
from tests.support.weights import Tensors


def noise(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()


TENSORS: Tensors = {
    "a": ("U8", (200_000,), noise(200_000, 1)),
    "b": ("F32", (0, 4), b""),
    "c": ("F32", (2, 3), noise(24, 2)),
    "é": ("F16", (65_536,), noise(131_072, 3)),
}


def packed(tensors: Tensors) -> tuple[Manifest, bytes]:
    manifest = manifest_of(tensors)
    checks = {name: vector.block_checks(data) for name, (_, _, data) in tensors.items()}
    return manifest, block_sidecar.pack(checks)


@pytest.fixture
def manifest() -> Manifest:
    return packed(TENSORS)[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "blocks"
    made.write_bytes(packed(TENSORS)[1])
    return made


def test_the_bytes_are_those_of_the_definition() -> None:
    manifest, content = packed(TENSORS)
    expected = b"raftmeta-blocks1" + (4).to_bytes(8, "little")
    for name in sorted(TENSORS, key=str.encode):
        for a, b in wcv_reference.blocks(TENSORS[name][2]):
            expected += a.to_bytes(8, "little") + b.to_bytes(8, "little")
    assert content == expected
    assert len(content) == block_file.size_of(tensor.size_bytes for tensor in manifest.tensors)


def test_a_manifest_that_names_it_is_sound_and_has_the_checksum_that_it_had(manifest: Manifest) -> None:
    _, content = packed(TENSORS)
    named = block_sidecar.naming(manifest, content)
    assert manifests.faults(named) == []
    file = block_file.find(named)
    assert file is not None and (file.size_bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert manifests.summarize(named, b"").checksum == manifests.summarize(manifest, b"").checksum


def test_every_tensor_reads_back_in_any_order(path: Path, manifest: Manifest) -> None:
    block_sidecar.judge(path, manifest)
    with block_sidecar.read(path, manifest) as checks:
        assert list(checks) == sorted(TENSORS)
        for name in reversed(list(checks)):
            assert np.array_equal(checks[name], vector.block_checks(TENSORS[name][2]))
        with pytest.raises(KeyError):
            checks["no such tensor"]


@settings(max_examples=30, deadline=None)
@given(sizes=st.dictionaries(st.text("ab\u00e9\uff5e\U0001f600.", min_size=1, max_size=4), st.integers(0, 3 * 65_536 + 9), max_size=6))
def test_any_set_of_tensors_reads_back(sizes: dict[str, int], tmp_path_factory: pytest.TempPathFactory) -> None:
    tensors = {name: ("U8", (size,), noise(size, number)) for number, (name, size) in enumerate(sizes.items())}
    manifest, content = packed(tensors)
    assert manifests.faults(block_sidecar.naming(manifest, content)) == []
    path = tmp_path_factory.mktemp("any") / "blocks"
    path.write_bytes(content)
    with block_sidecar.read(path, manifest) as checks:
        assert {name: checks[name].tolist() for name in checks} == {
            name: vector.block_checks(data).tolist() for name, (_, _, data) in tensors.items()
        }


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_flipped_bit_is_believed(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    manifest, content = packed(TENSORS)
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    path = tmp_path_factory.mktemp("damaged") / "blocks"
    path.write_bytes(damaged)
    with pytest.raises(RaftmetaError) as caught:
        block_sidecar.judge(path, manifest)
    assert caught.value.code == "integrity"


def test_damage_names_its_tensor_and_leaves_the_others_readable(path: Path, manifest: Manifest) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with block_sidecar.read(path, manifest) as checks:
        assert checks["a"].shape == (4, 2)
        with pytest.raises(RaftmetaError, match=r"tensor 'é' in .*: expected those of entry") as caught:
            checks["é"]
    assert caught.value.params["tensor"] == "é"


@pytest.mark.parametrize("change", ["longer", "shorter", "empty", "magic", "count", "other version"])
def test_a_file_of_something_else_is_refused_when_it_is_opened(path: Path, manifest: Manifest, change: str) -> None:
    content = path.read_bytes()
    other = packed({"a": ("U8", (1,), b"x")})[1]
    path.write_bytes(
        {
            "longer": content + b"\0",
            "shorter": content[:-1],
            "empty": b"",
            "magic": b"raftmeta-blocks2" + content[16:],
            "count": content[:16] + b"\5" + content[17:],
            "other version": other,
        }[change]
    )
    with pytest.raises(RaftmetaError, match="expected block checks of") as caught:
        block_sidecar.read(path, manifest)
    assert caught.value.code == "integrity"


def test_a_file_that_becomes_shorter_while_it_is_open_is_an_error_and_no_crash(path: Path, manifest: Manifest) -> None:
    with block_sidecar.read(path, manifest) as checks:
        path.write_bytes(path.read_bytes()[:110])
        with pytest.raises(RaftmetaError, match="ended at byte 110"):
            checks["é"]


def test_a_file_that_is_not_there_or_a_link_is_an_error(path: Path, manifest: Manifest) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    for wrong in (path.with_name("nothing"), link):
        with pytest.raises(RaftmetaError, match="cannot be opened") as caught:
            block_sidecar.read(wrong, manifest)
        assert caught.value.code == "internal"


def test_equal_shapes_with_other_weights_are_told_apart(path: Path) -> None:
    others = {name: (dtype, shape, noise(len(data), 9)) for name, (dtype, shape, data) in TENSORS.items()}
    with pytest.raises(RaftmetaError, match="tensor 'a'"):
        block_sidecar.judge(path, packed(others)[0])
