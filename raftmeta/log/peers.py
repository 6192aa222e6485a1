"""What the transport tells the engine about other members.

Events are values in arrival order per peer: `Connected` opens a link, `Received` follow in the order they were sent, `Disconnected` closes
it; a link that replaces another shows as `Disconnected` before the new `Connected`. The simulation's network makes the same values, so
nothing here knows of sockets.
"""

from __future__ import annotations

import msgspec

from raftmeta.log.messages import AnyMessage


class Connected(msgspec.Struct, frozen=True, gc=False):
    peer: str
    incarnation: int  # random number of the peer's process; another one means that the peer restarted
    feature: int = 1  # highest feature level that the peer can run


class Disconnected(msgspec.Struct, frozen=True, gc=False):
    peer: str


class Received(msgspec.Struct, frozen=True, gc=False):
    peer: str  # the authenticated name of the connection
    message: AnyMessage


PeerEvent = Connected | Disconnected | Received
