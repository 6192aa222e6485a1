"""A version of a few kilobytes: files on disk, their manifest, and the target that a control plane would decide."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from consistency import block_sidecar
from consistency.vector import backend, block_checks, root, tensor_entry
from node_agent.plan import Target
from raftmeta.core import manifest as manifests
from raftmeta.core.manifest import FORMAT, FileEntry, Manifest, TensorEntry
from raftmeta.core.probes import Probe


class Version(NamedTuple):
    directory: Path
    manifest: Manifest
    target: Target


def make_version(
    directory: Path, label: str, tensors: Mapping[str, bytes], sources: Sequence[str] | None = None, probes: tuple[Probe, ...] = ()
) -> Version:
    """Tensors of dtype U8, one after another in one file with a gap of ten bytes before the last; a config beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    config = f'{{"label": "{label}"}}'.encode()
    entries: list[TensorEntry] = []
    data = b"head of the file"
    for number, (name, value) in enumerate(sorted(tensors.items())):
        if number and number == len(tensors) - 1:
            data += b"-" * 10
        shape = (len(value),)
        entry = tensor_entry(memoryview(value), "U8", shape, backend("numpy")).entry
        entries.append(TensorEntry(name, "U8", shape, "w.safetensors", len(data), len(data) + len(value), _sha256(value), entry))
        data += value
    (directory / "config.json").write_bytes(config)
    (directory / "w.safetensors").write_bytes(data)
    manifest = Manifest(
        format=FORMAT,
        engine="fake",
        files=(
            FileEntry("config.json", len(config), _sha256(config), "config"),
            FileEntry("w.safetensors", len(data), _sha256(data), "weights"),
        ),
        tensors=tuple(entries),
        unbound=(),
        vector_root=root({item.name: item.entry for item in entries}),
        sources=tuple(sources if sources is not None else [directory.as_uri() + "/"]),
        probes=probes,
    )
    assert not manifests.faults(manifest)
    checksum = manifests.checksum(manifests.config_digest(manifest), manifests.weights_digest(manifest))
    return Version(directory, manifest, Target("encoder", label, checksum, manifest.vector_root))


def with_blocks(version: Version) -> Version:
    """The same version with its block checks, in a file beside the weights."""
    data = (version.directory / "w.safetensors").read_bytes()
    checks = {item.name: block_checks(data[item.begin : item.end], backend("numpy")) for item in version.manifest.tensors}
    content = block_sidecar.pack(checks)
    (version.directory / block_sidecar.entry_of(content).name).write_bytes(content)
    return version._replace(manifest=block_sidecar.naming(version.manifest, content))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
