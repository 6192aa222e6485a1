"""A manifest: the files and tensors of one version, with sizes and digests. Pure.

The digests bind everything: `weights_digest` the name, dtype, shape and bytes of every tensor, `config_digest` everything else that changes
an answer or its acceptance (the other files, the engine, the tensors declared unbound, the probes), `checksum` both. `faults` judges a
manifest against itself; whoever proposes a publish has run it, apply never decodes a manifest. Where the bytes come from (`sources`) is not
part of any digest.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from ipaddress import IPv6Address
from itertools import pairwise
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from raftmeta.core import block_file, probes
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.probes import Probe
from raftmeta.core.types import VersionSummary

FORMAT = "raftmeta-manifest-1"
MAX_PACKED_BYTES = 1 << 20  # a packed manifest travels inside its publish command
SMALL_BYTES = 4 << 10  # up to here the quickest level packs as well as the usual one
MAX_UNPACKED_BYTES = 64 << 20  # bound for decompression of a hostile body
MAX_TENSORS = 200_000
MAX_FILES = 10_000
MAX_RANK = 16
MAX_SIZE_BYTES = 1 << 46  # 64 TiB; keeps every sum inside 63 bits
MAX_FAULTS = 20  # reported at once

# bits per element, the names of the safetensors format
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}\Z")  # models, deployments, nodes, zones
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}\Z")  # version labels, semver text included
SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_HOST_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\Z")
MAX_HOST_CHARS = 253  # of a name in the DNS
MAX_SOURCE_CHARS = 2048
_SCHEMES = ("file:///", "http://", "https://", "s3://")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z")


ROLES = ("weights", "config", "tokenizer", "other")


class FileEntry(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    name: str  # relative POSIX path below the artifact root
    size_bytes: int
    sha256: str
    role: str


class TensorEntry(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int  # byte range in the file: [begin, end)
    end: int
    sha256: str
    entry: str  # the tensor's entry of the weight-consistency vector

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    format: str
    engine: str  # "hf" or another name of the agent's engine port
    files: tuple[FileEntry, ...]  # sorted by name
    tensors: tuple[TensorEntry, ...]  # sorted by name
    unbound: tuple[str, ...]  # sorted names of tensors that no module takes
    vector_root: str
    sources: tuple[str, ...]  # base URLs (file:///dir/, http(s)://host/dir/ or s3://bucket/prefix/), tried in order
    probes: tuple[Probe, ...] = ()  # what a node has to answer before it may serve


def faults(manifest: Manifest) -> list[str]:
    """Every way in which the manifest contradicts itself, in reading order, at most MAX_FAULTS; empty if it is sound."""
    found: list[str] = []
    for fault in _all_faults(manifest):
        found.append(fault)
        if len(found) == MAX_FAULTS:
            break
    return found


def whole(manifest: Manifest) -> dict[str, Any]:
    """Its fields by name in their order, also those that were left out: what is stored and hashed has all of them."""
    return msgspec.structs.asdict(manifest) | {"probes": probes.whole(manifest.probes)}


def pack(manifest: Manifest) -> bytes:
    """Canonical compressed bytes. Raises RaftmetaError manifest_too_large."""
    plain = _encoder.encode(whole(manifest))
    packed = zlib.compress(plain, 1 if len(plain) <= SMALL_BYTES else 6)
    if len(packed) > MAX_PACKED_BYTES:
        raise RaftmetaError("manifest_too_large", f"the packed manifest has {len(packed)} bytes, the limit is {MAX_PACKED_BYTES}")
    return packed


def unpack(packed: bytes) -> Manifest:
    """The manifest of these bytes. Raises RaftmetaError bad_manifest."""
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(packed, MAX_UNPACKED_BYTES)
        if not inflater.eof or inflater.unused_data:
            raise RaftmetaError("bad_manifest", "the packed manifest is cut, too large or followed by other bytes")
        return _decoder.decode(data)
    except (zlib.error, msgspec.MsgspecError) as cause:
        raise RaftmetaError("bad_manifest", f"the packed manifest cannot be read: {cause}") from cause


def weights_digest(manifest: Manifest) -> str:
    """SHA-256 over name, dtype, shape and content digest of every tensor in order of name, lengths first."""
    sha = hashlib.sha256(b"raftmeta weights 1\0")
    for tensor in manifest.tensors:
        shape = ",".join(map(str, tensor.shape))
        sha.update(_framed(tensor.name, tensor.dtype, shape, tensor.sha256))
    return sha.hexdigest()


def config_digest(manifest: Manifest) -> str:
    """SHA-256 over the engine, every file that holds no weights, the unbound names, and the probes if any, lengths first."""
    sha = hashlib.sha256(b"raftmeta config 1\0")
    sha.update(_framed(manifest.engine))
    for file in manifest.files:
        if file.role != "weights":
            sha.update(_framed(file.name, file.role, file.sha256))
    for name in manifest.unbound:
        sha.update(_framed("unbound", name))
    if manifest.probes:  # versions without any keep the digest that they had before there were probes
        sha.update(_framed("probes", probes.digest(manifest.probes)))
    return sha.hexdigest()


def tokenizer_digest(manifest: Manifest) -> str:
    """SHA-256 over the files that make the tokenizer, lengths first; "" when there are none."""
    files = [file for file in manifest.files if file.role == "tokenizer"]
    sha = hashlib.sha256(b"raftmeta tokenizer 1\0")
    for file in files:
        sha.update(_framed(file.name, file.sha256))
    return sha.hexdigest() if files else ""


def checksum(config: str, weights: str) -> str:
    """Checksum of a version: SHA-256(config digest || weights digest), both as 32 bytes."""
    return hashlib.sha256(bytes.fromhex(config) + bytes.fromhex(weights)).hexdigest()


def summarize(manifest: Manifest, packed: bytes) -> VersionSummary:
    """What the log keeps decoded of a version."""
    config, weights = config_digest(manifest), weights_digest(manifest)
    return VersionSummary(
        checksum=checksum(config, weights),
        config_digest=config,
        weights_digest=weights,
        vector_root=manifest.vector_root,
        manifest_digest=hashlib.sha256(packed).hexdigest(),
        size_bytes=sum(file.size_bytes for file in manifest.files),
        weights_bytes=sum(tensor.size_bytes for tensor in manifest.tensors),
        file_count=len(manifest.files),
        tensor_count=len(manifest.tensors),
    )


def path_fault(name: str) -> str | None:
    """Why a file name could leave the artifact root or surprise a shell, None if it is safe."""
    if not name or len(name.encode()) > 1024:
        return "is empty or longer than 1024 bytes"
    if _CONTROL.search(name) or "\\" in name:
        return "holds a control character or a backslash"
    if name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")):
        return "is not a plain relative path"
    return None


@lru_cache(maxsize=256)  # few places hold many versions
def source_fault(source: str) -> str | None:
    """Why nothing can be read from such a URL, wherever it is tried; None if it is well formed."""
    if not source.startswith(_SCHEMES) or len(source) > MAX_SOURCE_CHARS or _CONTROL.search(source):
        return f"is not a file, http, https or s3 URL of at most {MAX_SOURCE_CHARS} characters"
    if "?" in source or "#" in source:
        return "has a query or a fragment; a file name is put after its path"
    try:
        parts = urlsplit(source)
        port = parts.port
    except ValueError as cause:
        return f"is no URL: {cause}"
    if _CONTROL.search(unquote(parts.path)):
        return "has a control character in its path"
    if parts.scheme == "s3":
        return None if _BUCKET.match(parts.netloc) else "has no bucket name of 3 to 63 lower-case letters, digits, dots or hyphens"
    return None if parts.scheme == "file" else _server_fault(parts, port)


def _server_fault(parts: SplitResult, port: int | None) -> str | None:
    if "@" in parts.netloc:
        return "has user information"
    if port == 0:
        return "has the port 0"
    host = parts.hostname or ""
    try:
        if "[" in parts.netloc:
            IPv6Address(host)
            return None
        for label in host.split("."):
            if label.startswith("xn--"):
                label[4:].encode("ascii").decode("punycode")
    except ValueError as cause:
        return f"has a host that cannot be: {cause}"
    if len(host) > MAX_HOST_CHARS or not all(map(_HOST_LABEL.match, host.removesuffix(".").split("."))):
        return f"has no host name of at most {MAX_HOST_CHARS} characters: labels of 1 to 63 ASCII letters, digits, '-' or '_'"
    return None


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Size in bytes of a contiguous tensor of a known dtype."""
    count = 1
    for dim in shape:
        count *= dim
    return count * DTYPE_BITS[dtype] // 8


def _framed(*parts: str) -> bytes:
    """Each part after its length in bytes as a u32, little-endian."""
    framed: list[bytes] = []
    for part in parts:
        data = part.encode()
        framed += (len(data).to_bytes(4, "little"), data)
    return b"".join(framed)


def _all_faults(manifest: Manifest) -> Iterator[str]:
    if manifest.format != FORMAT:
        yield f"format is {manifest.format!r}, expected {FORMAT!r}"
    if not NAME.match(manifest.engine):
        yield f"engine {manifest.engine!r} is no name"
    if not SHA256.match(manifest.vector_root):
        yield "vector_root is not 64 lower-case hex characters"
    if len(manifest.files) > MAX_FILES or len(manifest.tensors) > MAX_TENSORS:
        yield f"more than {MAX_FILES} files or {MAX_TENSORS} tensors"
        return
    if not manifest.files:
        yield "no files"
    yield from _file_faults(manifest)
    yield from _tensor_faults(manifest)
    if len(manifest.tensors) > 1:
        yield from _overlaps(manifest)
    blocks = block_file.named_in(manifest)
    if blocks:
        yield from block_file.faults(manifest, blocks)
    if manifest.unbound:
        yield from _unbound_faults(manifest)
    if manifest.probes:
        yield from probes.faults(manifest.probes)
    for source in manifest.sources:
        fault = source_fault(source)
        if fault:
            yield f"source {source[:80]!r} {fault}"
    if len(manifest.sources) > 16:
        yield f"{len(manifest.sources)} sources, the limit is 16"


def _unbound_faults(manifest: Manifest) -> Iterator[str]:
    names = {tensor.name for tensor in manifest.tensors}
    yield from _order_faults("unbound", manifest.unbound)
    for name in manifest.unbound:
        if name not in names:
            yield f"unbound names {name!r}, which is no tensor of the manifest"


def _order_faults(what: str, names: Sequence[str]) -> Iterator[str]:
    for before, name in pairwise(names):
        if before == name:
            yield f"{what}: {name!r} stands twice"
        elif before > name:
            yield f"{what}: {name!r} stands after {before!r}; the list must be sorted"


def _file_faults(manifest: Manifest) -> Iterator[str]:
    if len(manifest.files) > 1:
        yield from _order_faults("files", [file.name for file in manifest.files])
    for file in manifest.files:
        fault = path_fault(file.name)
        if fault:
            yield f"{_what(file)} {fault}"
        if not SHA256.match(file.sha256):
            yield f"{_what(file)}: sha256 is not 64 lower-case hex characters"
        if not 0 <= file.size_bytes <= MAX_SIZE_BYTES:
            yield f"{_what(file)}: size_bytes {file.size_bytes} is outside 0..{MAX_SIZE_BYTES}"
        if file.role not in ROLES:
            yield f"{_what(file)}: role {file.role!r} is not one of {', '.join(ROLES)}"


def _tensor_faults(manifest: Manifest) -> Iterator[str]:
    files = {file.name: file for file in manifest.files}
    if len(manifest.tensors) > 1:
        yield from _order_faults("tensors", [tensor.name for tensor in manifest.tensors])
    for tensor in manifest.tensors:
        name, dtype, shape = tensor.name, tensor.dtype, tensor.shape
        if not name or len(name.encode()) > 1024 or _CONTROL.search(name):
            yield f"{_what(tensor)}: the name is empty, longer than 1024 bytes or holds a control character"
        if not SHA256.match(tensor.sha256) or not SHA256.match(tensor.entry):
            yield f"{_what(tensor)}: sha256 or entry is not 64 lower-case hex characters"
        file = files.get(tensor.file)
        if file is None or file.role != "weights":
            yield f"{_what(tensor)}: {tensor.file[:80]!r} is no weights file of the manifest"
        elif not 0 <= tensor.begin <= tensor.end <= file.size_bytes:
            yield f"{_what(tensor)}: bytes {tensor.begin}..{tensor.end} lie outside the {file.size_bytes} bytes of {file.name!r}"
        if dtype not in DTYPE_BITS:
            yield f"{_what(tensor)}: dtype {dtype[:20]!r} is unknown"
        elif len(shape) > MAX_RANK or (shape and not 0 <= min(shape) <= max(shape) <= MAX_SIZE_BYTES):
            yield f"{_what(tensor)}: shape {shape[:MAX_RANK]} has too many or impossible dimensions"
        elif tensor_bytes(dtype, shape) != tensor.size_bytes:
            need = tensor_bytes(dtype, shape)
            yield f"{_what(tensor)}: {dtype} {list(shape)} needs {need} bytes, the range has {tensor.size_bytes}"


def _what(entry: FileEntry | TensorEntry) -> str:
    return f"{'file' if isinstance(entry, FileEntry) else 'tensor'} {entry.name[:80]!r}"


def _overlaps(manifest: Manifest) -> Iterator[str]:
    spans = sorted((tensor.file, tensor.begin, tensor.end, tensor.name) for tensor in manifest.tensors)
    for (file, _, end, name), (next_file, begin, _, next_name) in pairwise(spans):
        if file == next_file and begin < end:
            yield f"tensors {name!r} and {next_name!r} overlap in {file!r}"


_encoder = msgspec.msgpack.Encoder()  # fields stay in their order
_decoder = msgspec.msgpack.Decoder(Manifest)
