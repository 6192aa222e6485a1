"""Which files of a directory belong to an artifact, and opening them without being led outside. Publish side.

A listing names every regular file once, by its path below the root, sorted. Links may point inside the root and nowhere else; special
files are refused; hidden files, byte code and formats that hold weights but are not served are reported as skipped. A file is opened only
if it is still the one that was listed, and `verify_unchanged` tells after reading whether it still is.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import NoReturn

from raftmeta.core import block_file
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import MAX_FILES, path_fault

MAX_DEPTH = 16  # of directories below the root
BLOCK_CHECKS = "block checks of other weights"
WEIGHTS_SUFFIX = ".safetensors"
_EXPECTED = f"expected the directory of a model, which holds *{WEIGHTS_SUFFIX} and its configuration"
_MAX_SHOWN = 6  # names in an error
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
_OTHER_WEIGHTS = (".h5", ".msgpack", ".onnx", ".gguf", ".ggml", ".ot", ".tflite", ".npz", ".mlmodel")
_CONFIG = ("config.json", "*_config.json", "config_*.json", "modules.json", "*.index.json", "raftmeta_module.json")
_TOKENIZER = (
    "tokenizer*.json", "vocab.txt", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.*",
    "tokenizer.model", "spiece.model", "sentencepiece*.model", "*.tiktoken",
)  # fmt: skip


@dataclass(frozen=True)
class Stamp:
    """What tells that a file is the same and unchanged."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int  # also moves when a copier writes in place and sets mtime back

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True)
class Found:
    name: str  # relative POSIX path below the root
    path: Path  # without links
    stamp: Stamp


@dataclass(frozen=True)
class Skipped:
    name: str
    reason: str


@dataclass(frozen=True)
class Listing:
    root: Path  # without links
    files: tuple[Found, ...]  # sorted by name
    skipped: tuple[Skipped, ...]

    @property
    def total_bytes(self) -> int:
        return sum(file.stamp.size_bytes for file in self.files)


def list_files(root: Path, max_files: int = MAX_FILES) -> Listing:
    """Raises RaftmetaError bad_field when the root is no directory, bad_manifest for what may not be published."""
    _check_root(root)
    resolved = root.resolve(strict=True)
    files: list[Found] = []
    skipped: list[Skipped] = []
    for found in _walk(resolved, resolved, 0):
        if isinstance(found, Skipped):
            skipped.append(found)
        else:
            files.append(found)
        if len(files) + len(skipped) > max_files:
            refuse(str(root), f"holds more than {max_files} files")
    files.sort(key=lambda file: file.name)
    if not any(file.name.endswith(WEIGHTS_SUFFIX) for file in files):
        pickles = [item.name for item in skipped if item.name.endswith(_PICKLES)]
        if pickles:
            refuse(pickles[0], f"is a pickle, which can run code when it is read; expected *{WEIGHTS_SUFFIX}: convert it first")
        refuse(str(root), f"holds no *{WEIGHTS_SUFFIX}: expected at least one, found {shown([file.name for file in files], skipped)}")
    return Listing(resolved, tuple(files), tuple(skipped))


def list_file(path: Path) -> Listing:
    """One file on its own. Raises RaftmetaError bad_field when nothing is there, bad_manifest for what is no regular file."""
    try:
        resolved = path.resolve(strict=True)
        found = _regular(resolved, resolved.name)
    except (OSError, RuntimeError) as cause:  # RuntimeError: a loop of links
        raise RaftmetaError("bad_field", f"{path} cannot be read: {getattr(cause, 'strerror', '') or cause}") from cause
    return Listing(resolved.parent, (found,), ())


def shown(names: Sequence[str], skipped: Sequence[Skipped] = ()) -> str:
    """What a directory holds, in a few words."""
    named = [_printable(name) for name in names] + [f"{item.name} ({item.reason})" for item in skipped]
    more = [f"{len(named) - _MAX_SHOWN} more"] if len(named) > _MAX_SHOWN else []
    return ", ".join(named[:_MAX_SHOWN] + more) or "no file"


def role_of(name: str) -> str:
    """The role of a file in a manifest, by its name."""
    base = PurePosixPath(name).name
    if base.endswith(WEIGHTS_SUFFIX):
        return "weights"
    if any(fnmatchcase(base, pattern) for pattern in _TOKENIZER):
        return "tokenizer"
    return "config" if any(fnmatchcase(base, pattern) for pattern in _CONFIG) else "other"


@contextmanager
def open_inside(root: Path, file: Found) -> Iterator[FileIO]:
    """The file, unbuffered, if it is still the one that was listed and lies inside the root."""
    try:
        # Without O_NONBLOCK a named pipe that took the place of the file would hang the open.
        descriptor = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as cause:
        raise RaftmetaError("bad_manifest", f"{file.name!r} cannot be opened: {cause.strerror}") from cause
    with FileIO(descriptor, "r") as stream:
        # A directory on the way may have become a link since the listing; the kernel knows where the open ended.
        real = Path(f"/proc/self/fd/{descriptor}").readlink()
        if not real.is_relative_to(root) or Stamp.of(os.fstat(descriptor)) != file.stamp:
            refuse(file.name, "was replaced after the directory was listed")
        yield stream


def verify_unchanged(file: Found) -> None:
    """Raises RaftmetaError bad_manifest unless the path still leads to the file as it was listed."""
    try:
        found = Stamp.of(os.lstat(file.path))
    except OSError as cause:
        raise RaftmetaError("bad_manifest", f"{file.name!r} changed while it was read: {cause.strerror}") from cause
    if found != file.stamp:
        refuse(file.name, f"changed while it was read: expected {_show(file.stamp)}, found {_show(found)}")


def _check_root(root: Path) -> None:
    try:
        mode = root.stat().st_mode
    except OSError as cause:
        raise RaftmetaError("bad_field", f"{root} is no directory: {cause.strerror}; {_EXPECTED}") from cause
    if not stat.S_ISDIR(mode):
        inside = f", for instance {root.parent}" if root.name.endswith(WEIGHTS_SUFFIX) else ""
        raise RaftmetaError("bad_field", f"{root} is no directory but a file; {_EXPECTED}{inside}")


def refuse(name: str, fault: str) -> NoReturn:
    raise RaftmetaError("bad_manifest", f"{name!r} {fault}", file=_printable(name))


def _walk(root: Path, directory: Path, depth: int) -> Iterator[Found | Skipped]:
    if depth > MAX_DEPTH:
        refuse(directory.relative_to(root).as_posix(), f"lies more than {MAX_DEPTH} directories deep")
    try:
        with os.scandir(directory) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
    except OSError as cause:
        raise RaftmetaError("bad_manifest", f"the directory {str(directory)!r} cannot be listed: {cause.strerror}") from cause
    for entry in listed:
        path = Path(entry.path)
        name = path.relative_to(root).as_posix()
        reason = _skip_reason(entry.name)
        if reason:
            yield Skipped(_printable(name), reason)
        elif entry.is_symlink():
            yield _follow(root, path, name)
        elif entry.is_dir():
            yield from _walk(root, path, depth + 1)
        else:
            yield _regular(path, name)


def _follow(root: Path, path: Path, name: str) -> Found | Skipped:
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as cause:  # RuntimeError: a loop of links
        raise RaftmetaError("bad_manifest", f"{name!r} is a link that leads nowhere", file=_printable(name)) from cause
    if not target.is_relative_to(root):
        refuse(name, "is a link that leaves the artifact root; copy the directory with its links followed (cp -rL)")
    if target.is_dir():
        return Skipped(_printable(name), "link to a directory of the artifact, whose files are listed under their own names")
    return _regular(target, name)


def _regular(path: Path, name: str) -> Found:
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        refuse(name, "is no regular file")
    try:
        fault = path_fault(name)
    except UnicodeEncodeError as cause:
        raise RaftmetaError("bad_manifest", f"file name {_printable(name)} is no valid UTF-8") from cause
    if fault:
        refuse(name, fault)
    return Found(name, path, Stamp.of(status))


def _skip_reason(base: str) -> str:
    """Why a file or directory of this name is left out, "" if it is not."""
    if base.startswith("."):
        return "hidden"
    if base == "__pycache__":
        return "byte code"
    if base.endswith(_PICKLES):
        return f"pickled or opaque weights; only *{WEIGHTS_SUFFIX} is served"
    if base.endswith(_OTHER_WEIGHTS):
        return f"weights of another format; only *{WEIGHTS_SUFFIX} is served"
    return BLOCK_CHECKS if block_file.is_name(base) else ""


def _printable(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()


def _show(stamp: Stamp) -> str:
    return f"inode {stamp.inode}, {stamp.size_bytes} bytes, mtime {stamp.mtime_ns} ns, ctime {stamp.ctime_ns} ns"
