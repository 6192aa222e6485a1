"""Which snapshot each follower is being sent, and for how long that file and the journal behind it stay for it. Pure.

A transfer that takes longer than the next snapshots need to be taken would otherwise never end: its file would be pruned, or what it leads
to would no longer be in the journal. So a transfer that moves holds both; one that does not move for PIN_S holds nothing.
"""

from __future__ import annotations

from raftmeta.log.snapshots import SnapshotMeta

PIN_S = 30.0  # a chunk is answered in milliseconds; a follower that restarts goes on where it stopped


class Transfer:
    __slots__ = ("meta", "moved_at", "through")

    def __init__(self, meta: SnapshotMeta, now: float) -> None:
        self.meta, self.moved_at = meta, now
        self.through = 0  # bytes that were sent, in order


class Transfers:
    def __init__(self) -> None:
        self._by_peer: dict[str, Transfer] = {}

    def of(self, peer: str) -> Transfer | None:
        return self._by_peer.get(peer)

    def begin(self, peer: str, meta: SnapshotMeta, now: float) -> Transfer:
        transfer = self._by_peer[peer] = Transfer(meta, now)
        return transfer

    def sent(self, peer: str, through: int, now: float) -> None:
        """A chunk that ends there; the same one again moves nothing."""
        transfer = self._by_peer[peer]
        if through > transfer.through:
            transfer.through, transfer.moved_at = through, now

    def drop(self, meta: SnapshotMeta) -> None:
        """Nobody gets any more of it."""
        self._by_peer = {peer: transfer for peer, transfer in self._by_peer.items() if transfer.meta != meta}

    def held(self, now: float) -> list[SnapshotMeta]:
        """The snapshots of transfers that move."""
        return [transfer.meta for transfer in self._by_peer.values() if now - transfer.moved_at <= PIN_S]
