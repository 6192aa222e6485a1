"""Is the library behind the wall the one that the wall was built around?

The wall replaces private methods of PySyncObj 0.3.17. Another source, or asserts switched off, would change what the simulation proved,
so a member checks both before it opens anything. The digest covers the modules that the engine runs.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from raftmeta.core.errors import RaftmetaError

MODULES = (
    "config.py",
    "fast_queue.py",
    "journal.py",
    "monotonic.py",
    "node.py",
    "poller.py",
    "serializer.py",
    "syncobj.py",
    "transport.py",
)
DIGEST = "9a890000e7f777aacf9ba94d780a97d6d523a6cd46ce837612bb48024405b30f"  # of version 0.3.17


def check_library() -> None:
    """Raises RaftmetaError integrity when the installed source is another one, or when asserts are off."""
    if not __debug__:
        raise RaftmetaError("integrity", "python -O removes the asserts that guard the log; run without -O and PYTHONOPTIMIZE")
    found = library_digest()
    if found != DIGEST:
        detail = f"the installed pysyncobj is not the 0.3.17 that this build was proved with: expected {DIGEST}, found {found}"
        raise RaftmetaError("integrity", detail)


def library_digest() -> str:
    """SHA-256 over name and content of the modules that the engine runs, without importing them."""
    spec = importlib.util.find_spec("pysyncobj")
    if spec is None or not spec.submodule_search_locations:
        raise RaftmetaError("integrity", "pysyncobj is not installed")
    folder = Path(spec.submodule_search_locations[0])
    sha = hashlib.sha256()
    for name in MODULES:
        try:
            data = (folder / name).read_bytes().replace(b"\r\n", b"\n")
        except OSError as cause:
            raise RaftmetaError("integrity", f"pysyncobj lacks {name}: {cause}") from cause
        sha.update(f"{name} {len(data)}\0".encode())
        sha.update(data)
    return sha.hexdigest()
