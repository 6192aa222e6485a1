"""From a directory of weights to its manifest, reading every byte once. Publish side; an agent checks the same digests on its own.

Every file below the root is either in the manifest or reported as skipped with a reason. What could change the meaning of the published
bytes is refused: links that leave the root, special files, files that change while they are read, headers that fail the gate, tensors that
stand in two files, an index that contradicts its shards. The vector covers every tensor of the manifest, unbound ones included.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar

from consistency import block_sidecar, described, vector
from consistency.artifact_files import BLOCK_CHECKS, Listing, Skipped, list_files, refuse, shown
from consistency.artifact_reader import Progress, Reader
from raftmeta.core import module_description
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import FORMAT, FileEntry, Manifest, TensorEntry, faults

_NEEDED_FILES = {"hf": "config.json", "torch_module": module_description.FILE}  # engine -> a file without which it cannot bind

FindUnbound = Callable[[Path, Sequence[str]], Iterable[str]]  # root, tensor names -> those that no module takes


class Named(Protocol):
    """A tensor in a file."""

    @property
    def name(self) -> str: ...
    @property
    def file(self) -> str: ...


NamedT = TypeVar("NamedT", bound=Named)


def _ignore(_: object) -> None: ...


@dataclass(frozen=True)
class Artifact:
    manifest: Manifest  # without a file of block checks
    blocks: bytes  # what such a file holds for these weights


@dataclass(frozen=True)
class Hooks:
    """What the caller wants to hear and can find out. `find_unbound` is asked when the caller does not name the unbound tensors."""

    progress: Callable[[Progress], None] = _ignore
    skipped: Callable[[Skipped], None] = _ignore
    find_unbound: FindUnbound | None = None


def build_manifest(
    root: Path, *, sources: Sequence[str], engine: str, unbound: Sequence[str] | None, hooks: Hooks | None = None
) -> Manifest:
    """The manifest of the directory as it is now. Raises RaftmetaError bad_manifest, or bad_field when `unbound` is needed and unknown."""
    return read_artifact(root, sources=sources, engine=engine, unbound=unbound, hooks=hooks).manifest


def read_artifact(
    root: Path, *, sources: Sequence[str], engine: str, unbound: Sequence[str] | None, hooks: Hooks | None = None
) -> Artifact:
    """The same with the block checks. Raises as `build_manifest` does."""
    hooks = hooks or Hooks()
    if unbound is None and hooks.find_unbound is None:
        raise RaftmetaError(
            "bad_field", "the unbound tensors are not known and cannot be found out here: expected their names or an empty list"
        )
    listing = listed(root, engine)
    for item in listing.skipped:
        if item.reason != BLOCK_CHECKS:
            hooks.skipped(item)
    with Reader(listing, hooks.progress) as reader:
        for file in listing.files:
            reader.read(file)
    tensors = merge(reader.tensors)
    for name, content in reader.indexes.items():
        _check_index(name, content, tensors)
    if engine == "torch_module":
        _check_description(listing.root, tensors, unbound or ())
    if unbound is None:
        assert hooks.find_unbound is not None
        unbound = tuple(hooks.find_unbound(listing.root, sorted(tensors)))
    _check_still_the_same(listing, root)
    manifest = _assemble(reader.files, tensors, engine, (sources, unbound))
    blocks = block_sidecar.pack(reader.checks)
    own = block_sidecar.entry_of(blocks).name
    for item in listing.skipped:
        if item.reason == BLOCK_CHECKS and item.name != own:
            hooks.skipped(item)
    return Artifact(manifest, blocks)


def listed(root: Path, engine: str) -> Listing:
    """The files of the directory, none of them opened. Raises as `build_manifest` does when it is none that the engine could serve."""
    listing = list_files(root)
    _check_needed(engine, root, [file.name for file in listing.files])
    return listing


def _check_needed(engine: str, root: Path, names: Sequence[str]) -> None:
    """What the engine looks for at the top of the directory; one level too high is the usual mistake."""
    needed = _NEEDED_FILES.get(engine)
    if not needed or needed in names:
        return
    weights = {PurePosixPath(name).parent for name in names if name.endswith(".safetensors")}
    below = [parent for name in names if PurePosixPath(name).name == needed and (parent := PurePosixPath(name).parent) in weights]
    found = f"it stands in {str(root / below[0])!r}: publish that directory" if below else f"found {shown(names)}"
    refuse(needed, f"is missing in {str(root)!r}; the engine {engine!r} cannot bind without it: {found}")


def _check_description(root: Path, tensors: dict[str, TensorEntry], unbound: Sequence[str]) -> None:
    """A node would refuse the version; this tells it while there is somebody who can mend it."""
    if unbound:
        refuse(module_description.FILE, f"asks for every tensor, and {unbound[0]!r} is declared unbound")
    wanted = described.read(root).tensors
    fault = module_description.tensor_fault(wanted, {name: (item.dtype, tuple(item.shape)) for name, item in tensors.items()})
    if fault:
        refuse(module_description.FILE, f"does not fit the tensors beside it: {fault}")


def _assemble(
    files: list[FileEntry], tensors: dict[str, TensorEntry], engine: str, declared: tuple[Sequence[str], Sequence[str]]
) -> Manifest:
    sources, unbound = declared
    manifest = Manifest(
        format=FORMAT,
        engine=engine,
        files=tuple(files),
        tensors=tuple(tensors[name] for name in sorted(tensors)),
        unbound=tuple(sorted(unbound)),
        vector_root=vector.root({name: tensor.entry for name, tensor in tensors.items()}),
        sources=tuple(sources),
    )
    found = faults(manifest)
    if found:
        raise RaftmetaError("bad_manifest", "; ".join(found))
    return manifest


def merge(tensors: Iterable[NamedT]) -> dict[str, NamedT]:
    """By name. Raises RaftmetaError bad_manifest for a tensor that stands in two files."""
    merged: dict[str, NamedT] = {}
    for tensor in tensors:
        first = merged.setdefault(tensor.name, tensor)
        if first is not tensor:
            raise RaftmetaError(
                "bad_manifest",
                f"tensor {tensor.name!r} stands in {first.file!r} and in {tensor.file!r}; expected in one file",
                tensor=tensor.name,
            )
    return merged


def _check_index(index: str, content: bytes, tensors: dict[str, TensorEntry]) -> None:
    """The index of a sharded model must name exactly the tensors of its shards, each with the shard that holds it."""
    try:
        weight_map: Any = json.loads(content.decode())["weight_map"]
        folder = PurePosixPath(index).parent
        claimed = {name: (folder / shard).as_posix() for name, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise RaftmetaError("bad_manifest", f"{index!r} holds no readable weight_map: {cause!r}", file=index) from cause
    shards = set(claimed.values())
    actual = {name: tensor.file for name, tensor in tensors.items() if tensor.file in shards}
    for name in sorted(claimed.keys() | actual.keys()):
        if claimed.get(name) != actual.get(name):
            expected, found = claimed.get(name, "no file"), actual.get(name, "no file")
            raise RaftmetaError(
                "bad_manifest",
                f"{index!r} places tensor {name[:80]!r} in {expected!r}, the shards hold it in {found!r}",
                tensor=name[:80],
                expected=expected,
                found=found,
            )


def _check_still_the_same(listing: Listing, root: Path) -> None:
    """Nothing was added, removed, replaced or written since the listing."""
    again = list_files(root)
    before, after = set(listing.files), set(again.files)
    for file in sorted(before ^ after, key=lambda file: file.name):
        refuse(file.name, "was added, removed or written while the directory was read")
