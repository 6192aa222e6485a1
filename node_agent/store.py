"""The blob store of one node: content-addressed files under store_dir/blobs/sha256, and a directory per version to open models from.

A blob enters by its SHA-256 or not at all: bytes go to a temporary file, are hashed while they arrive, fsynced, read back from the disk and
hashed again, then renamed. Partial blobs survive a restart, so a fetch resumes. Tensors are blobs of their own, weight files are never
stored whole. `collect` removes what no kept manifest names. The quota bounds all blobs together; one agent owns the directory.
The directory of a version holds copies of its small files, which are checked before each use: damage on one side never reaches the other.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from node_agent.beside import Beside
from raftmeta.core import block_file
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import SHA256, FileEntry, Manifest, pack, path_fault, unpack
from raftmeta.durable import OsDisk, read_file, write_file

CHUNK = 1 << 20
RESERVE_BYTES = 64 << 20  # left free on the disk for the agent's own records

_DISK = OsDisk()


class Store:
    def __init__(self, root: Path, quota_bytes: int, close: Callable[[int], None] = os.close) -> None:
        """`close` takes over the descriptor of a blob that was read to its end."""
        self.root = root
        self._close = close
        self.beside = Beside(self)  # what versions have beside their weights, as it is now
        self._blobs = root / "blobs" / "sha256"
        self._partial = root / "partial"
        self._versions = root / "versions"
        self._manifests = root / "manifests"
        self._quota = quota_bytes
        self._writing: set[Path] = set()  # partial blobs that a writer has
        self._claims = threading.Lock()
        for path in (self._blobs, self._partial, self._versions, self._manifests):
            path.mkdir(parents=True, exist_ok=True, mode=0o750)
        for path in self._partial.glob("*.*"):  # of a second writer of its blob; the first one's goes on
            path.unlink(missing_ok=True)

    # --- blobs

    def path(self, sha256: str) -> Path:
        assert SHA256.match(sha256), sha256
        return self._blobs / sha256[:2] / sha256[2:]

    def has(self, sha256: str, size_bytes: int) -> bool:
        """A blob of that name and size is here. Its content was checked when it entered; `open` users check what they read."""
        try:
            return self.path(sha256).stat().st_size == size_bytes
        except FileNotFoundError:
            return False

    def missing(self, blobs: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """Those of the (sha256, size) pairs that are not here, each once, in order."""
        return [blob for blob in dict.fromkeys(blobs) if not self.has(*blob)]

    def writer(self, sha256: str, size_bytes: int) -> BlobWriter:
        """Takes the bytes of one blob, after what an earlier writer left. Several writers of one blob know nothing of each other."""
        partial = self._claim(sha256)
        try:
            return BlobWriter(partial, self.path(sha256), sha256, size_bytes, lambda: self._writing.discard(partial))
        except BaseException:
            self._writing.discard(partial)
            raise

    def _claim(self, sha256: str) -> Path:
        with self._claims:
            names = itertools.chain([sha256], (f"{sha256}.{number}" for number in itertools.count(1)))
            partial = next(path for name in names if (path := self._partial / name) not in self._writing)
            self._writing.add(partial)
            return partial

    def open(self, sha256: str, size_bytes: int) -> BlobFile:
        """For reading. The reader checks the content by the vector of where it went. Raises RaftmetaError, also for another size."""
        path = self.path(sha256)
        with _disk_errors(path):
            blob = BlobFile(path, self._close)
            if blob.size_bytes != size_bytes:
                blob.close()
                raise RaftmetaError("integrity", f"blob {sha256} has {blob.size_bytes} bytes, expected {size_bytes}")
            return blob

    def discard(self, sha256: str) -> None:
        """Forget a blob that failed its check, so that it is fetched again."""
        self.path(sha256).unlink(missing_ok=True)

    def reserve(self, need_bytes: int) -> None:
        """Refuse with the numbers when `need_bytes` more, those that others are about to bring included, exceed the quota or the disk."""
        used = self.used_bytes()
        if used + need_bytes > self._quota:
            raise RaftmetaError("quota_exceeded", f"the store holds {used} bytes and needs {need_bytes} more, the quota is {self._quota}")
        free = shutil.disk_usage(self._blobs).free
        if need_bytes + RESERVE_BYTES > free:
            raise RaftmetaError(
                "disk_full", f"the store needs {need_bytes} bytes and {RESERVE_BYTES} of reserve, the disk has {free} bytes free"
            )

    def used_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._all_blobs())

    def sync(self) -> None:
        """Make the names of all blobs durable. Called once before `prepared` is attested."""
        for path in (self._blobs, *self._blobs.iterdir(), self._versions, self._manifests):
            _sync_directory(path)

    # --- manifests and versions

    def put_manifest(self, checksum: str, manifest: Manifest) -> None:
        write_file(_DISK, self._manifests / checksum, pack(manifest))

    def manifest(self, checksum: str) -> Manifest | None:
        """The stored manifest of a version, None if there is none. Raises RaftmetaError when it is damaged."""
        packed = read_file(_DISK, self._manifests / checksum)
        return None if packed is None else unpack(packed)

    def version_dir(self, checksum: str) -> Path:
        return self._versions / checksum

    def version_fault(self, checksum: str, manifest: Manifest) -> str:
        """Why the directory is not exactly the files of the manifest, read from the disk now; empty if it is."""
        return _directory_fault(self.version_dir(checksum), manifest)

    def materialize(self, checksum: str, manifest: Manifest) -> Path:
        """A directory with every file that holds no weights under its own name, verified; complete or absent. One call at a time.

        Raises BlobMismatch when files have to be fetched (again): the blobs that were not what they should be are gone.
        """
        final = self.version_dir(checksum)
        if not self.version_fault(checksum, manifest):
            return final
        files = _plain_files(manifest)
        wrong = {file.sha256: file.name for file in files if not check_blob(self.path(file.sha256), file.sha256)}
        for sha256 in wrong:
            self.discard(sha256)
        if wrong:
            raise BlobMismatch("integrity", f"blobs missing or changed on the disk: {', '.join(sorted(wrong.values())[:5])} ({len(wrong)})")
        building, old = self._versions / f".{checksum}.new", self._versions / f".{checksum}.old"
        with _disk_errors(final):
            for path in (building, old):
                shutil.rmtree(path, ignore_errors=True)
            building.mkdir(mode=0o750)
            for file in files:
                assert path_fault(file.name) is None, file.name
                _copy(self.path(file.sha256), building / file.name)
            for directory, _, _ in os.walk(building):
                _sync_directory(Path(directory))
            fault = _directory_fault(building, manifest)
            if fault:
                raise BlobMismatch("integrity", f"files of version {checksum}: the disk gave back others: {fault}")
            if final.exists():
                final.rename(old)
            building.rename(final)
            _sync_directory(self._versions)
            shutil.rmtree(old, ignore_errors=True)
        return final

    def collect(self, keep: Iterable[str]) -> int:
        """Remove every version whose checksum is not kept and each blob that no kept one names. Gives the bytes freed.

        A kept checksum without a manifest stops the collection: what it needs cannot be known.
        """
        kept: set[str] = set()
        named: set[str] = set()
        for checksum in keep:
            kept.add(checksum)
            manifest = self.manifest(checksum)
            if manifest is None:
                return 0
            named.update(sha256 for sha256, _ in blobs_of(manifest))
        for path in self._versions.iterdir():
            if path.name not in kept:
                shutil.rmtree(path)
        for path in self._manifests.iterdir():
            if path.name not in kept:
                path.unlink()
        freed = 0
        for path in (*self._all_blobs(), *self._partial.iterdir()):
            sha256 = path.name.partition(".")[0] if path.parent == self._partial else path.parent.name + path.name
            if sha256 not in named:
                freed += path.stat().st_size
                path.unlink()
        return freed

    def versions(self) -> frozenset[str]:
        """Checksums of all versions that have a manifest here."""
        return frozenset(path.name for path in self._manifests.iterdir() if SHA256.match(path.name))

    def _all_blobs(self) -> Iterator[Path]:
        for shard in self._blobs.iterdir():
            yield from shard.iterdir()


class BlobMismatch(RaftmetaError):
    """Bytes that arrived, or lie on the disk, are not the blob's; nothing of them is kept."""


class BlobFile:
    """One blob, open for reading by any number of threads. `close` takes over the descriptor."""

    def __init__(self, path: Path, close: Callable[[int], None]) -> None:
        self._path = path
        self._close = close
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self.size_bytes = os.fstat(self._fd).st_size

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill all of `into` with the bytes from `offset`. Raises RaftmetaError when the file has fewer."""
        with _disk_errors(self._path):
            done = 0
            while done < len(into):
                count = os.preadv(self._fd, [into[done:]], offset + done)
                if not count:
                    raise RaftmetaError("integrity", f"blob {self._path.parent.name}{self._path.name} ended at byte {offset + done}")
                done += count

    def close(self) -> None:
        self._close(self._fd)


class BlobWriter:
    """One blob on its way in. `offset` is where the source should go on; `resumed` says that an earlier writer's bytes count."""

    def __init__(self, partial: Path, final: Path, sha256: str, size_bytes: int, release: Callable[[], None]) -> None:
        """`release`: the partial file is let go, at the end."""
        self._release: Callable[[], None] | None = release
        self._partial = partial
        self._final = final
        self._sha256 = sha256
        self._size = size_bytes
        self._hash = hashlib.sha256()
        self.offset = 0
        with _disk_errors(partial):
            self._fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
            if os.fstat(self._fd).st_size > size_bytes:
                os.ftruncate(self._fd, 0)
            while chunk := os.pread(self._fd, CHUNK, self.offset):
                self._hash.update(chunk)
                self.offset += len(chunk)
        self.resumed = self.offset > 0

    def write(self, data: bytes | memoryview) -> None:
        if self.offset + len(data) > self._size:
            self.abandon()
            raise BlobMismatch("integrity", f"blob {self._sha256}: more than its {self._size} bytes arrived")
        self._hash.update(data)
        view = memoryview(data)
        with _disk_errors(self._partial):
            while view:
                written = os.pwrite(self._fd, view, self.offset)
                self.offset += written
                view = view[written:]

    def commit(self, judge: Callable[[Path], None] | None = None) -> None:
        """The blob is in the store; or BlobMismatch, and nothing is. `judge` may refuse the right digest too (RaftmetaError integrity)."""
        found = self._hash.hexdigest()
        if self.offset != self._size or found != self._sha256:
            self.abandon()
            raise BlobMismatch("integrity", f"blob {self._sha256} of {self._size} bytes: found {found} after {self.offset} bytes")
        with _disk_errors(self._partial):
            os.fsync(self._fd)
            again = _read_back(self._fd)
            if again != self._sha256:
                self.abandon()
                raise BlobMismatch("integrity", f"blob {self._sha256}: the disk gave back {again}")
            if judge is not None:
                self._ask(judge)
            os.fchmod(self._fd, 0o440)
            self._close()
            self._final.parent.mkdir(exist_ok=True, mode=0o750)
            self._partial.rename(self._final)
            self.pause()

    def _ask(self, judge: Callable[[Path], None]) -> None:
        try:
            judge(self._partial)
        except RaftmetaError as cause:
            if cause.code != "integrity":
                raise
            self.abandon()
            raise BlobMismatch(cause.code, cause.detail) from cause

    def pause(self) -> None:
        """Keep what arrived for a later writer. Does nothing the second time."""
        self._close()
        release, self._release = self._release, None
        if release is not None:
            release()

    def abandon(self) -> None:
        """Throw away what arrived."""
        self._close()
        if self._release is not None:
            self._partial.unlink(missing_ok=True)
        self.pause()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def blobs_of(manifest: Manifest) -> Iterator[tuple[str, int]]:
    """(sha256, size) of everything a version needs: its files that hold no weights, its tensors, and their block checks if published."""
    for file in manifest.files:
        if file.role != "weights":
            yield file.sha256, file.size_bytes
    for tensor in manifest.tensors:
        yield tensor.sha256, tensor.size_bytes
    blocks = block_file.find(manifest)
    if blocks is not None:
        yield blocks.sha256, blocks.size_bytes


def check_blob(path: Path, sha256: str) -> bool:
    """The file holds these bytes now."""
    try:
        with open(path, "rb", buffering=0) as file:
            return _read_back(file.fileno()) == sha256
    except OSError as cause:
        if cause.errno not in (errno.ENOENT, errno.EIO):  # EIO: the disk itself knows that it lost them
            raise
        return False


def _plain_files(manifest: Manifest) -> list[FileEntry]:
    return [file for file in manifest.files if file.role != "weights"]


def _directory_fault(directory: Path, manifest: Manifest) -> str:
    """The first difference; files that no manifest names count, because a library may pick them up."""
    if not directory.is_dir():
        return "no directory"
    wanted = {file.name: file.sha256 for file in _plain_files(manifest)}
    found = {
        path.relative_to(directory).as_posix(): path.lstat() for path in directory.rglob("*") if path.is_symlink() or not path.is_dir()
    }
    different = sorted(wanted.keys() ^ found.keys())
    if different:
        return f"{different[0]!r} is {'missing' if different[0] in wanted else 'in no manifest'}"
    for name, sha256 in wanted.items():
        if not stat.S_ISREG(found[name].st_mode) or found[name].st_nlink != 1:
            return f"{name!r} is not a file of its own"
        if not check_blob(directory / name, sha256):
            return f"{name!r} has other bytes"
    return ""


def _copy(blob: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
    shutil.copyfile(blob, target)
    fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fchmod(fd, 0o440)
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_back(fd: int) -> str:
    """Digest of the file, from the disk rather than the page cache where the kernel allows."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    sha = hashlib.sha256()
    offset = 0
    while chunk := os.pread(fd, CHUNK, offset):
        sha.update(chunk)
        offset += len(chunk)
    return sha.hexdigest()


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as cause:
        code = "disk_full" if cause.errno in (errno.ENOSPC, errno.EDQUOT) else "internal"
        raise RaftmetaError(code, f"{path}: {cause}") from cause


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
