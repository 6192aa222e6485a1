"""Manifests: what each digest binds, what contradicts itself, packing and its bounds."""

from __future__ import annotations

import hashlib
import os
import zlib

import msgspec
import pytest

from raftmeta.core import manifest as m
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import FileEntry, Manifest, TensorEntry
from tests.support.commands import digest_of

replace = msgspec.structs.replace


def tensor(name: str = "a.weight", begin: int = 100, shape: tuple[int, ...] = (2, 3), **changes: object) -> TensorEntry:
    size = 4
    for dim in shape:
        size *= dim
    made = TensorEntry(name, "F32", shape, "model.safetensors", begin, begin + size, digest_of(name), digest_of(f"entry {name}"))
    return replace(made, **changes)


def manifest(**changes: object) -> Manifest:
    made = Manifest(
        format=m.FORMAT,
        engine="hf",
        files=(
            FileEntry("config.json", 50, digest_of("config"), "config"),
            FileEntry("model.safetensors", 1_000, digest_of("weights"), "weights"),
            FileEntry("vocab.txt", 10, digest_of("vocab"), "tokenizer"),
        ),
        tensors=(tensor("a.weight", 100), tensor("b.bias", 124)),
        unbound=("b.bias",),
        vector_root=digest_of("root"),
        sources=("file:///models/m/",),
    )
    return replace(made, **changes)


def with_file(place: int, **changes: object) -> Manifest:
    files = list(manifest().files)
    files[place] = replace(files[place], **changes)
    return manifest(files=tuple(files))


def with_tensor(**changes: object) -> Manifest:
    return manifest(tensors=(tensor("a.weight", 100), replace(tensor("b.bias", 124), **changes)))


def test_a_sound_manifest_has_no_faults() -> None:
    assert m.faults(manifest()) == []
    assert m.faults(manifest(tensors=(), unbound=())) == []
    assert m.faults(manifest(tensors=(tensor("a", 100, (0, 5)), tensor("b", 100, ())), unbound=())) == []


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (manifest(format="raftmeta-manifest-2"), "format is"),
        (manifest(engine="HF"), "is no name"),
        (manifest(vector_root="A" * 64), "vector_root"),
        (manifest(files=()), "no files"),
        (manifest(files=manifest().files[::-1]), "must be sorted"),
        (manifest(files=(*manifest().files, manifest().files[-1])), "stands twice"),
        (with_file(0, name="/etc/passwd"), "is not a plain relative path"),
        (with_file(0, name="../config.json"), "is not a plain relative path"),
        (with_file(0, name="a//b"), "is not a plain relative path"),
        (with_file(0, name="a/./b"), "is not a plain relative path"),
        (with_file(0, name=""), "is empty or longer"),
        (with_file(0, name="a" * 1_025), "is empty or longer"),
        (with_file(0, name="a\\b"), "control character or a backslash"),
        (with_file(0, name="a\nb"), "control character or a backslash"),
        (with_file(0, sha256="x"), "sha256 is not"),
        (with_file(0, size_bytes=-1), "size_bytes -1"),
        (with_file(0, size_bytes=m.MAX_SIZE_BYTES + 1), "size_bytes"),
        (with_file(0, role="code"), "role 'code'"),
        (manifest(tensors=manifest().tensors[::-1]), "must be sorted"),
        (manifest(tensors=(tensor(), tensor())), "stands twice"),
        (with_tensor(name=""), "the name is empty"),
        (with_tensor(name="z" * 1_025), "the name is empty, longer"),
        (with_tensor(name="z\x7f"), "holds a control character"),
        (with_tensor(sha256="x"), "sha256 or entry"),
        (with_tensor(entry="x"), "sha256 or entry"),
        (with_tensor(file="other"), "is no weights file"),
        (with_tensor(file="config.json"), "is no weights file"),
        (with_tensor(begin=-24, end=0), "lie outside"),
        (with_tensor(begin=990, end=1_014), "lie outside"),
        (with_tensor(begin=148, end=124), "lie outside"),
        (with_tensor(dtype="F31"), "dtype 'F31' is unknown"),
        (with_tensor(shape=(1,) * 17), "too many or impossible"),
        (with_tensor(shape=(-2, -3)), "too many or impossible"),
        (with_tensor(shape=(m.MAX_SIZE_BYTES + 1,)), "too many or impossible"),
        (with_tensor(dtype="F64"), "needs 48 bytes, the range has 24"),
        (with_tensor(shape=(2, 4)), "needs 32 bytes, the range has 24"),
        (with_tensor(begin=123, end=147), "overlap"),
        (manifest(unbound=("c",)), "is no tensor"),
        (manifest(unbound=("b.bias", "a.weight")), "must be sorted"),
        (manifest(unbound=("a.weight", "a.weight")), "stands twice"),
        (manifest(sources=("ftp://host/",)), "is not a file, http, https or s3 URL"),
        (manifest(sources=("http://host/" + "x" * 2_048,)), "is not a file, http, https or s3 URL"),
        (manifest(sources=("http://host/\n",)), "is not a file, http, https or s3 URL"),
        (manifest(sources=("http://host/",) * 17), "17 sources"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_found_out(bad: Manifest, fault: str) -> None:
    found = m.faults(bad)
    assert any(fault in each for each in found), found


def test_tensors_of_two_files_may_have_the_same_range() -> None:
    other = FileEntry("model-2.safetensors", 1_000, digest_of("more"), "weights")
    files = (manifest().files[0], other, *manifest().files[1:])
    two = manifest(files=files, tensors=(tensor("a.weight", 100), tensor("b.bias", 100, file="model-2.safetensors")))
    assert m.faults(two) == []


def test_all_faults_are_reported_at_once_up_to_a_bound() -> None:
    assert len(m.faults(manifest(engine="HF", vector_root="", files=(), tensors=(), unbound=()))) == 3
    many = tuple(tensor(f"t{number:03}", 100) for number in range(100))
    assert len(m.faults(manifest(tensors=many, unbound=()))) == m.MAX_FAULTS


@pytest.mark.parametrize("changes", [{"files": manifest().files * 4_000}, {"tensors": (tensor(),) * (m.MAX_TENSORS + 1)}])
def test_too_many_files_or_tensors_are_one_fault(changes: dict[str, object]) -> None:
    assert m.faults(manifest(**changes)) == [f"more than {m.MAX_FILES} files or {m.MAX_TENSORS} tensors"]


def test_packing_is_undone_by_unpacking() -> None:
    packed = m.pack(manifest())
    assert m.unpack(packed) == manifest()
    assert m.pack(manifest()) == packed


def test_a_manifest_that_does_not_fit_a_command_is_refused() -> None:
    random = tuple(replace(tensor(f"t{number:06}", 100), sha256=os.urandom(32).hex()) for number in range(40_000))
    with pytest.raises(RaftmetaError, match="manifest_too_large"):
        m.pack(manifest(tensors=random))


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"garbage",
        m.pack(manifest())[:-1],
        m.pack(manifest()) + b"x",
        zlib.compress(b"\x90"),
        zlib.compress(bytes(m.MAX_UNPACKED_BYTES + 1)),
    ],
)
def test_bytes_that_are_no_packed_manifest_are_refused(packed: bytes) -> None:
    with pytest.raises(RaftmetaError, match="bad_manifest"):
        m.unpack(packed)


@pytest.mark.parametrize(
    "changes",
    [
        {"tensors": (tensor("a.weight", 100), tensor("c.bias", 124)), "unbound": ()},
        {"tensors": (tensor("a.weight", 100), tensor("b.bias", 124, dtype="I32"))},
        {"tensors": (tensor("a.weight", 100), tensor("b.bias", 124, shape=(3, 2)))},
        {"tensors": (tensor("a.weight", 100), tensor("b.bias", 124, sha256=digest_of("else")))},
        {"tensors": (tensor("a.weight", 100),)},
    ],
)
def test_the_weights_digest_binds_name_dtype_shape_and_bytes(changes: dict[str, object]) -> None:
    assert m.weights_digest(manifest(**changes)) != m.weights_digest(manifest())


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "onnx"},
        {"unbound": ()},
        {"unbound": ("a.weight",)},
        {"files": (replace(manifest().files[0], sha256=digest_of("else")), *manifest().files[1:])},
        {"files": (replace(manifest().files[0], name="config-2.json"), *manifest().files[1:])},
        {"files": (replace(manifest().files[0], role="other"), *manifest().files[1:])},
        {"files": manifest().files[:2]},
    ],
)
def test_the_config_digest_binds_everything_else_that_changes_an_answer(changes: dict[str, object]) -> None:
    assert m.config_digest(manifest(**changes)) != m.config_digest(manifest())
    assert m.weights_digest(manifest(**changes)) == m.weights_digest(manifest())


def test_where_the_bytes_come_from_and_how_they_lie_is_in_no_digest() -> None:
    elsewhere = manifest(
        sources=("https://mirror/",),
        tensors=(tensor("a.weight", 200), tensor("b.bias", 300)),
        files=(manifest().files[0], replace(manifest().files[1], sha256=digest_of("repacked")), manifest().files[2]),
    )
    assert m.config_digest(elsewhere) == m.config_digest(manifest())
    assert m.weights_digest(elsewhere) == m.weights_digest(manifest())


def test_the_summary_says_what_the_manifest_says() -> None:
    packed = m.pack(manifest())
    summary = m.summarize(manifest(), packed)
    config, weights = m.config_digest(manifest()), m.weights_digest(manifest())
    assert summary.checksum == hashlib.sha256(bytes.fromhex(config + weights)).hexdigest() == m.checksum(config, weights)
    assert (summary.config_digest, summary.weights_digest, summary.vector_root) == (config, weights, digest_of("root"))
    assert summary.manifest_digest == hashlib.sha256(packed).hexdigest()
    assert (summary.size_bytes, summary.weights_bytes, summary.file_count, summary.tensor_count) == (1_060, 48, 3, 2)


@pytest.mark.parametrize(("dtype", "shape", "size"), [("F32", (2, 3), 24), ("BF16", (), 2), ("U8", (0, 9), 0), ("F8_E4M3", (5,), 5)])
def test_a_tensor_has_the_bytes_of_its_shape(dtype: str, shape: tuple[int, ...], size: int) -> None:
    assert m.tensor_bytes(dtype, shape) == size


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("file://host/dir/", "is not a file, http, https or s3 URL"),
        ("http://[::1/", "is no URL"),
        ("http://[::1", "is no URL"),
        ("http://host:x/", "is no URL"),
        ("http://host:99999/", "is no URL"),
        ("http://host:0/", "port 0"),
        ("file:///%00/", "control character"),
        ("http://host/%0a/", "control character"),
        ("http://user:pass@host/", "user information"),
        ("http://host/?key=1", "query or a fragment"),
        ("file:///dir/#1", "query or a fragment"),
        ("http:///dir/", "no host name"),
        ("http://a..b/", "no host name"),
        ("http://" + "a" * 64 + "/", "no host name"),
        ("http://" + "a." * 127 + "a/", "no host name"),
        ("http://-a/", "no host name"),
        ("http://xn--/", "no host name"),
        ("http://xn--a\u00e9/", "a host that cannot be"),
        ("http://xn--99999999/", "a host that cannot be"),
        ("http://\u00e9.invalid/", "no host name"),
        ("http://[::1%25/]/", "is no URL"),
        ("http://[1:2]/", "'1:2' does not appear to be"),
        ("http://[v1.a]/", "a host that cannot be"),
        ("s3:///prefix/", "no bucket name"),
        ("s3://Bucket/", "no bucket name"),
        ("s3://ab/", "no bucket name"),
        ("s3://key:secret@bucket/", "no bucket name"),
        ("s3://bucket:80/", "no bucket name"),
        ("s3://bucket/?versionId=1", "query or a fragment"),
    ],
)
def test_a_source_that_nothing_could_be_read_from_is_refused(source: str, fault: str) -> None:
    assert fault in (m.source_fault(source) or "no fault")
    assert any(fault in found for found in m.faults(manifest(sources=(source,))))


@pytest.mark.parametrize(
    "source",
    [
        "file:///", "file:///models/with%20space/", "file:///models/caf\u00e9/", "http://host", "http://HOST.example.:8080/dir/",
        "https://[::1]:8443/dir/", "http://10.0.0.1/", "http://my_store:1/", "http://xn--bcher-kva.example/", "http://host/%zz/",
        "s3://models", "s3://models.eu-1/minilm/v1/",
    ],
)  # fmt: skip
def test_a_source_that_something_could_be_read_from_is_taken(source: str) -> None:
    assert m.source_fault(source) is None
    assert m.faults(manifest(sources=(source,))) == []
