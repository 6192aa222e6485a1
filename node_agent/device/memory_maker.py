"""Where a keeper's memory comes from: the port, and memory of the host behind it (memfd), which needs no device.

Memory is known by a descriptor. Whoever gets one may map it and share it further; it lives until the last descriptor and mapping are gone.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from node_agent.device import headroom
from node_agent.refusal import Refusal

# <linux/fcntl.h>, <linux/memfd.h>; not in the modules of every build of Python 3.11
_F_ADD_SEALS: Final = 1033
_SEALS: Final = 0x0001 | 0x0002 | 0x0004  # of the seals themselves, against shrinking, against growing


class Memory(NamedTuple):
    descriptor: int
    let_go: Callable[[], None]  # closes the descriptor, and whatever else stands for the memory here. Raises Refusal device_failed


class MemoryMaker(Protocol):
    def padded(self, size: int) -> int:
        """What an allocation of this many bytes takes."""

    def make(self, name: str, size: int) -> Memory:
        """`size` is a padded one. Raises Refusal no_headroom, or device_failed."""


class MemfdMaker:
    """Pages of the host, all of them there from the start; nobody can shrink the file under those who map it."""

    def padded(self, size: int) -> int:
        page = os.sysconf("SC_PAGE_SIZE")
        return -(-size // page) * page

    def make(self, name: str, size: int) -> Memory:
        headroom.require_memory(size, f"memory {name} of the keeper")
        fd = os.memfd_create(f"raftmeta-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, size)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
        except OSError as cause:
            os.close(fd)
            if cause.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            found = errno.errorcode[cause.errno]
            raise Refusal("no_headroom", f"memory {name} of the keeper", f"{size} bytes", found) from cause
        return Memory(fd, lambda: os.close(fd))
