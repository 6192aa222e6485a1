"""Publications for loads: small ones with an opaque manifest, and versions with many tensors whose manifests are like real ones.

apply checks a manifest's digest and decodes nothing, so a small publication may carry any bytes. A manifest with tensors is packed as a
publisher packs it; its digests are random, so it compresses no better than a real one.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

from raftmeta.core import manifest as m
from raftmeta.core.commands import Publish
from raftmeta.core.types import VersionSummary

_DIGEST = hashlib.sha256(b"benchmark").hexdigest()
MODELS = 100  # that the versions of `items` are spread over
TENSOR_BYTES = 4 << 20


def publication(model: str, number: int, manifest_bytes: int = 128) -> Publish:
    """A version with that many bytes of manifest, other ones for each number."""
    packed = random.Random(number).randbytes(manifest_bytes)
    summary = VersionSummary(_DIGEST, _DIGEST, _DIGEST, _DIGEST, hashlib.sha256(packed).hexdigest(), 1 << 20, 1 << 20, 4, 100)
    return Publish(model, f"v{number}", summary, packed)


def items(prefix: str, versions: int, tensors: int, batch_bytes: int) -> Iterator[tuple[Publish, ...]]:
    """`versions` publications with that many tensors each, over MODELS models, in batches of about `batch_bytes`."""
    chance = random.Random(f"{prefix} {tensors}")
    batch: list[Publish] = []
    size = 0
    for number in range(versions):
        manifest = large(chance, tensors)
        packed = m.pack(manifest)
        item = Publish(f"{prefix}-{number % MODELS}", f"1.0.{number}", m.summarize(manifest, packed), packed)
        size += len(packed) + 512
        batch.append(item)
        if size >= batch_bytes or len(batch) == 1_000:
            yield tuple(batch)
            batch, size = [], 0
    if batch:
        yield tuple(batch)


def large(chance: random.Random, tensors: int) -> m.Manifest:
    """A sound manifest of one file, as of a transformer's layers."""
    size = tensors * TENSOR_BYTES
    entries = tuple(
        m.TensorEntry(
            name=f"encoder.layer.{number:04d}.attention.self.query.weight",
            dtype="F32",
            shape=(1024, 1024),
            file="model.safetensors",
            begin=number * TENSOR_BYTES,
            end=(number + 1) * TENSOR_BYTES,
            sha256=chance.randbytes(32).hex(),
            entry=chance.randbytes(32).hex(),
        )
        for number in range(tensors)
    )
    file = m.FileEntry("model.safetensors", size, chance.randbytes(32).hex(), "weights")
    return m.Manifest(m.FORMAT, "hf", (file,), entries, (), chance.randbytes(32).hex(), ("file:///srv/models/",))
