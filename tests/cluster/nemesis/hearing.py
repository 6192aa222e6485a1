"""`python -m tests.cluster.nemesis.hearing`, inside fresh namespaces: who hears whom while links are open, cut and healed.

A cut that cuts nothing would make every run pass. One datagram goes from each member's namespace to each other's,
in every state of the links.
"""

from __future__ import annotations

import ctypes
import socket
from itertools import permutations
from pathlib import Path

from tests.cluster.nemesis.places import ZONES, Namespaces, address

PORT = 7400
HEARD_S = 0.3
CLONE_NEWNET = 0x40000000


def main() -> None:
    place = Namespaces()
    place.join()
    sockets = {zone: _socket_in(zone) for zone in ZONES}
    print("open:", _heard(sockets))
    place.cut("a", "b")
    print("a to b cut:", _heard(sockets))
    place.cut("b", "a")
    place.cut("c", "a")
    print("also b to a and c to a:", _heard(sockets))
    place.heal()
    print("healed:", _heard(sockets))


def _heard(sockets: dict[str, socket.socket]) -> str:
    """The ordered pairs between which a datagram arrives."""
    return " ".join(
        sender + receiver for sender, receiver in permutations(ZONES, 2) if _arrives(sockets[sender], sockets[receiver], receiver)
    )


def _arrives(sender: socket.socket, receiver: socket.socket, zone: str) -> bool:
    sender.sendto(b"hello", (address(zone), PORT))
    try:
        return receiver.recv(100) == b"hello"
    except TimeoutError:
        return False


def _socket_in(zone: str) -> socket.socket:
    """A socket stays in the namespace in which it was made."""
    with Path("/proc/self/ns/net").open() as here, Path(f"/run/netns/{zone}").open() as there:
        _enter(there.fileno())
        try:
            made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        finally:
            _enter(here.fileno())
    made.bind((address(zone), PORT))
    made.settimeout(HEARD_S)
    return made


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


if __name__ == "__main__":
    main()
