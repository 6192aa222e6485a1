"""Who the members are. A configuration is a value; every change of it is one log entry that carries the whole new configuration."""

from __future__ import annotations

import msgspec

from raftmeta.core.errors import RaftmetaError


class MemberSpec(msgspec.Struct, frozen=True, array_like=True):
    id: str
    zone: str
    peer_address: str  # host:port of the log transport
    api_url: str


class Configuration(msgspec.Struct, frozen=True, array_like=True):
    """`members` is sorted by id, without repeats. No members: not part of a cluster yet; such a member never stands for election."""

    members: tuple[MemberSpec, ...] = ()

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(member.id for member in self.members)

    @property
    def quorum(self) -> int:
        return len(self.members) // 2 + 1

    def peers_of(self, member_id: str) -> tuple[str, ...]:
        return tuple(member.id for member in self.members if member.id != member_id)


def configuration_of(members: tuple[MemberSpec, ...]) -> Configuration:
    """A configuration of these members in any order. Raises RaftmetaError bad_field when an id repeats."""
    ordered = tuple(sorted(members, key=lambda member: member.id))
    ids = [member.id for member in ordered]
    if len(set(ids)) != len(ids):
        raise RaftmetaError("bad_field", f"member ids repeat: {', '.join(ids)}")
    return Configuration(ordered)


def differs_by_one(old: Configuration, new: Configuration) -> bool:
    """Whether at most one member was added or removed: then every two majorities of the two configurations meet."""
    return len(set(old.ids) ^ set(new.ids)) <= 1


def encode(configuration: Configuration) -> bytes:
    return _encoder.encode(configuration)


def decode(data: bytes) -> Configuration:
    """Raises msgspec.MsgspecError."""
    return _decoder.decode(data)


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(Configuration)
