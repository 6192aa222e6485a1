"""A process that runs out of file descriptors while its members talk; prints `ok` when the listener survived. Run by a test."""

from __future__ import annotations

import os
import resource
import socket
import sys
from pathlib import Path

from raftmeta.addresses import split_address
from tests.support.mesh import Mesh


def main(directory: Path) -> None:
    with Mesh(directory) as mesh:
        a = mesh.add("a")
        mesh.add("b")
        mesh.introduce()
        mesh.pump(mesh.linked)
        late = socket.socket()  # made before the drought, connects during it
        late.setblocking(False)
        hoard = drain()
        late.connect_ex(split_address(a.transport.address()))
        mesh.pump(lambda: a.count("accept_paused") >= 1)
        assert a.count("pending_closed") == 0
        mesh.everybody_talks()
        a.clock.advance(1.0)
        mesh.pump(lambda: a.count("accept_paused") >= 2)  # tried again, still nothing
        mesh.everybody_talks()
        for fd in hoard:
            os.close(fd)
        a.clock.advance(1.0)
        mesh.add("c")
        mesh.introduce()
        mesh.pump(mesh.linked)
        mesh.everybody_talks()
        late.close()
        mesh.pump(lambda: a.count("pending_closed") == 1)
    sys.stdout.write("ok\n")


def drain() -> list[int]:
    """Take every descriptor that is left."""
    used = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count, no paths
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    hoard: list[int] = []
    while True:
        try:
            hoard.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            return hoard


if __name__ == "__main__":
    main(Path(sys.argv[1]))
