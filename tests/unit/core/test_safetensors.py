"""The gate of safetensors files: exact headers pass, everything else is refused with tensor, expected and found."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import DTYPE_BITS, tensor_bytes
from raftmeta.core.safetensors import MAX_HEADER_BYTES, Header, HeaderTensor, header_length, parse_header
from tests.support.weights import file_bytes, header_of, safetensors_bytes, tiny_tensors


def parse(content: bytes) -> Header:
    return parse_header(content, len(content))


def refusal(content: bytes) -> RaftmetaError:
    with pytest.raises(RaftmetaError) as caught:
        parse(content)
    assert caught.value.code == "bad_manifest"
    return caught.value


def test_an_exact_header_locates_every_byte() -> None:
    tensors = tiny_tensors()
    content = safetensors_bytes(tensors)
    header = parse(content)
    assert header.data_begin == 8 + int.from_bytes(content[:8], "little")
    assert {tensor.name for tensor in header.tensors} == tensors.keys()
    for tensor in header.tensors:
        assert (tensor.dtype, tensor.shape, content[tensor.begin : tensor.end]) == tensors[tensor.name]


def test_only_the_head_is_needed() -> None:
    content = safetensors_bytes(tiny_tensors())
    length = header_length(content[:8], len(content))
    assert parse_header(content[: 8 + length], len(content)) == parse(content)


def test_tensors_come_in_order_of_their_bytes_whatever_the_header_says() -> None:
    header = {
        "b": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [2, 3]},
    }
    reordered = dict(reversed(header.items()))
    assert [tensor.name for tensor in parse(file_bytes(reordered, bytes(3))).tensors] == ["b", "a"]


def test_metadata_and_padding_are_no_tensors() -> None:
    text = json.dumps({"__metadata__": {"format": "pt"}, **header_of({"w": ("U8", (1,), b"x")})}) + "     "
    assert parse(file_bytes(text, b"x")).tensors == (HeaderTensor("w", "U8", (1,), 8 + len(text), 9 + len(text)),)


def test_a_file_without_tensors_passes() -> None:
    assert parse(file_bytes({}, b"")).tensors == ()


GOOD: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def one(**changes: Any) -> bytes:
    return file_bytes({"w": GOOD | changes}, bytes(8))


def with_keys(*keys: str) -> bytes:
    """The good tensor under JSON strings as they stand in the file."""
    return file_bytes("{" + ", ".join(f'"{key}": {json.dumps(GOOD)}' for key in keys) + "}", bytes(8))


OVER = (MAX_HEADER_BYTES + 1).to_bytes(8, "little")
FLAWS: dict[str, tuple[bytes, str]] = {
    "cut inside the length": (b"\x10\0\0", "cut inside the length of its header: expected 8, found 3"),
    "empty file": (b"", "cut inside the length"),
    "cut header": (file_bytes({"w": GOOD}, b"")[:20], "cut inside its header"),
    "length of nothing": (bytes(8), "too short for a JSON object"),
    "header above the limit": (OVER + b"{}", "too large: expected at most 16777216 bytes, found 16777217"),
    "length of all ones": (b"\xff" * 8 + b"{}", "too large"),
    "no object": (file_bytes("[1]", b""), "no JSON object"),
    "byte order mark": (file_bytes("\ufeff{}", b""), "no JSON object"),
    "newline after": (file_bytes("{}\n", b""), "no JSON object"),
    "no JSON": (file_bytes("{'w': 1}", b""), "not strict JSON"),
    "two values": (file_bytes("{} {}", b""), "not strict JSON"),
    "no UTF-8": (b"\x04\0\0\0\0\0\0\0" + b'{"\xff}', "not strict JSON"),
    "deep nesting": (file_bytes('{"w":' + "[" * 200_000 + "]" * 200_000 + "}", b""), "not strict JSON"),
    "NaN": (file_bytes('{"w": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 1]}}', b"x"), "no whole number.*found NaN"),
    "infinity": (file_bytes('{"w": Infinity}', b""), "no whole number"),
    "fraction": (one(shape=[2.0]), "no whole number.*found 2.0"),
    "huge number": (file_bytes('{"w": ' + "9" * 5_000 + "}", b""), "not strict JSON"),
    "repeated tensor": (with_keys("w", "w"), "'w' stands twice"),
    "repeated tensor, once escaped": (with_keys("w", "\\u0077"), "'w' stands twice"),
    "repeated field": (file_bytes('{"w": {"dtype": "U8", "dtype": "I8"}}', b""), "'dtype' stands twice"),
    "metadata that is no map": (file_bytes({"__metadata__": ["x"]}, b""), "no map of strings.*found list"),
    "metadata with numbers": (file_bytes({"__metadata__": {"x": 1}}, b""), "no map of strings"),
    "tensor that is no object": (file_bytes({"w": 5}, b""), "tensor 'w' has other fields.*found int"),
    "missing field": (file_bytes({"w": {"dtype": "F32", "shape": [2]}}, bytes(8)), "data_offsets, dtype, shape, found dtype, shape"),
    "further field": (one(strides=[1]), "other fields.*strides"),
    "unknown dtype": (one(dtype="F33"), "dtype is unknown: .* found 'F33'"),
    "dtype that is no text": (one(dtype=5), "dtype is unknown"),
    "dtype that is a list": (one(dtype=["F32"]), "dtype is unknown"),
    "shape that is no list": (one(shape=2), "shape is impossible"),
    "negative dimension": (one(shape=[-2]), "shape is impossible"),
    "boolean dimension": (one(shape=[True, 2]), "shape is impossible"),
    "impossible dimension": (one(shape=[1 << 60, 0]), "shape is impossible"),
    "rank 17": (one(shape=[1] * 16 + [2]), "shape is impossible"),
    "three offsets": (one(data_offsets=[0, 4, 8]), "range is impossible"),
    "offsets backwards": (one(data_offsets=[8, 0]), "range is impossible"),
    "negative offset": (one(data_offsets=[-8, 0]), "range is impossible"),
    "boolean offset": (one(data_offsets=[False, 8]), "range is impossible"),
    "range larger than the shape": (one(shape=[1]), "expected 4 bytes, found 8 bytes"),
    "range smaller than the shape": (one(shape=[3]), "expected 12 bytes, found 8 bytes"),
    "dtype of another width": (one(dtype="F64"), "expected 16 bytes, found 8 bytes"),
    "gap at the front": (file_bytes({"w": GOOD | {"data_offsets": [1, 9]}}, bytes(9)), "'w' leaves a gap after the header"),
    "gap between": (
        file_bytes({"v": GOOD, "w": GOOD | {"data_offsets": [9, 17]}}, bytes(17)),
        "'w' leaves a gap after tensor 'v'",
    ),
    "overlap": (file_bytes({"v": GOOD, "w": GOOD | {"data_offsets": [4, 12]}}, bytes(12)), "'w' overlaps tensor 'v'"),
    "same bytes for two tensors": (file_bytes({"v": GOOD, "w": GOOD}, bytes(8)), "'w' overlaps tensor 'v'"),
    "empty tensor inside another": (
        file_bytes({"v": GOOD, "w": {"dtype": "U8", "shape": [0], "data_offsets": [4, 4]}}, bytes(8)),
        "'w' overlaps tensor 'v'",
    ),
    "trailing byte": (file_bytes({"w": GOOD}, bytes(9)), "bytes follow the last tensor"),
    "data without tensors": (file_bytes({}, b"x"), "bytes follow the last tensor"),
    "cut data": (file_bytes({"w": GOOD}, bytes(7)), "tensor 'w' ends behind it"),
    "200,001 tensors": (
        file_bytes(json.dumps(dict.fromkeys(range(200_001), 0)), b""),
        "too many tensors: expected at most 200000, found 200001",
    ),
    "empty name": (file_bytes({"": GOOD}, bytes(8)), "empty or too long"),
    "name of 1025 bytes": (file_bytes({"é" * 512 + "x": GOOD}, bytes(8)), "expected 1..1024 bytes, found 1025 bytes"),
    "NUL in the name": (file_bytes({"a\0b": GOOD}, bytes(8)), "control character"),
    "escape in the name": (file_bytes({"a\x1bb": GOOD}, bytes(8)), "control character"),
    "C1 control in the name": (file_bytes({"a\x9bb": GOOD}, bytes(8)), "control character"),
    "half a surrogate pair": (with_keys("\\ud800"), "no valid Unicode"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flawed_file_is_refused(flaw: str) -> None:
    content, reason = FLAWS[flaw]
    with pytest.raises(RaftmetaError, match=reason) as caught:
        parse(content)
    assert caught.value.code == "bad_manifest"


def test_the_pattern_of_the_flaws_passes_without_a_flaw() -> None:
    assert parse(one()).tensors[0].shape == (2,)
    assert parse(file_bytes({"é" * 512: GOOD}, bytes(8))).tensors[0].end - parse(one()).tensors[0].begin > 8


def test_a_refusal_names_tensor_expected_and_found() -> None:
    error = refusal(file_bytes({"layer.0.weight": GOOD | {"shape": [3]}}, bytes(8)))
    assert error.params == {"tensor": "layer.0.weight", "expected": "12 bytes", "found": "8 bytes"}


def test_a_head_shorter_than_the_header_is_refused() -> None:
    content = safetensors_bytes(tiny_tensors())
    with pytest.raises(RaftmetaError, match="not read to its end"):
        parse_header(content[:40], len(content))


names = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=30).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(names, st.tuples(st.sampled_from(sorted(DTYPE_BITS)), shapes), max_size=6))
def test_every_exact_file_passes(declared: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    tensors = {name: (dtype, shape, bytes(tensor_bytes(dtype, shape))) for name, (dtype, shape) in declared.items()}
    header = parse(safetensors_bytes(tensors))
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors} == declared


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 255), st.integers(-2, 2))
def test_a_damaged_file_is_refused_or_still_tiles_exactly(position: int, change: int, growth: int) -> None:
    tensors = {"a": ("U8", (3,), b"abc"), "b.weight": ("F16", (2, 2), bytes(8)), "c": ("I64", (), bytes(8))}
    content = bytearray(safetensors_bytes(tensors))
    content[position % len(content)] ^= change
    size = len(content) + growth
    try:
        header = parse_header(bytes(content), size)
    except RaftmetaError as error:
        assert error.code == "bad_manifest"
        return
    position = header.data_begin
    for tensor in header.tensors:
        assert tensor.begin == position
        assert tensor.end - tensor.begin == tensor_bytes(tensor.dtype, tensor.shape)
        position = tensor.end
    assert position == size


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_refused_with_a_code(content: bytes) -> None:
    try:
        parse(content)
    except RaftmetaError as error:
        assert error.code == "bad_manifest"


def test_files_of_the_library_pass_and_mean_the_same() -> None:
    numpy_io = pytest.importorskip("safetensors.numpy")
    numpy = pytest.importorskip("numpy")
    arrays = {"w": numpy.arange(12, dtype="float32").reshape(3, 4), "n": numpy.array(7, dtype="int64"), "e": numpy.zeros((0, 2), "float16")}
    content = numpy_io.save(arrays, metadata={"format": "np"})
    for tensor in parse(content).tensors:
        assert content[tensor.begin : tensor.end] == arrays[tensor.name].tobytes()
        assert tensor.shape == arrays[tensor.name].shape
