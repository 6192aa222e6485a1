"""Whether any process has a file in shared memory mapped: a shared lock that each of them holds on it.

The lock is one of the open file description (F_OFD_SETLK), so the kernel keeps it as long as a descriptor or a mapping of it lives and
drops it with the last one, however the process ends. Who wants to remove the file takes the same lock exclusively first: then nobody has
it mapped, and nobody can begin to. It is advisory, and apart from the writer's lock (flock), which excludes a second writer.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from typing import Final

# struct flock of a 64-bit Linux: type, whence, start, length, pid, and what pads it to eight bytes
_FLOCK: Final = "hhqqi4x"
_BYTE: Final = 1  # which byte of the file stands for the lock; any would do


def announce(fd: int) -> bool:
    """From now on this open file counts as mapped. False when somebody is about to remove the file."""
    return _set(fd, fcntl.F_RDLCK)


def exclude(fd: int) -> bool:
    """Nobody maps the file from here on, until the descriptor is closed. False when somebody does. Needs a descriptor for writing."""
    return _set(fd, fcntl.F_WRLCK)


def is_mapped(fd: int) -> bool:
    """Somebody else has announced it. Right at the moment of the call."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, _BYTE, 1, 0)
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)
    kind: int = struct.unpack(_FLOCK, found)[0]
    return kind != fcntl.F_UNLCK


def _set(fd: int, kind: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, _BYTE, 1, 0))
    except OSError as cause:
        if cause.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True
