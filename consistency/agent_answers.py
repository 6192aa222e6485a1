"""What agents answer to a checker, as it is on the wire, and how far it is believed. Pure: bytes in, values out.

Fields are added by later builds, never taken away: unknown ones are left alone, and those that an earlier build does not know have a
meaning here. Whatever is outside its form, says another name, or is older than was asked for is a fault of that node.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from consistency.findings import NodeVector
from raftmeta.core.manifest import MAX_TENSORS

T = TypeVar("T")

FROM_MEMORY = "memory"
MAX_DEPLOYMENTS = 100_000
MAX_NAME_BYTES = 1_024  # of a tensor's name, as in manifests
MAX_LAG_MS = 1e12  # thirty years; a side's sum of these stays a number, and so does everything that is made of it
MAX_COUNT = (1 << 53) - 1  # the greatest that every reader of JSON takes

_Digest = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]  # empty: none
_Entry = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Text = Annotated[str, Meta(max_length=256)]
_Slot = Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | _Text
_Age = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
_Count = Annotated[int, Meta(ge=-1, le=MAX_COUNT)]
_Lag = Annotated[float, Meta(ge=-1, le=MAX_LAG_MS)]  # -1: the node does not know it


class AgentFault(Exception):
    """Why a node could not be looked at."""

    def __init__(self, code: str, detail: str, status: int = 0) -> None:
        """`status`: of the answer, 0 where none refused."""
        super().__init__(f"{code}: {detail}")
        self.status = status
        self.code = code  # unreachable | timed_out | attested | too_old | insecure_url | bad_answer | untrusted | refused
        # | one of errors.CODES | another one of the node's own
        self.detail = detail


class VectorSeen(msgspec.Struct, frozen=True):
    """One deployment of a node."""

    model: _Text
    version: _Text
    checksum: _Digest
    slot: _Slot
    epoch: _Count
    vector_root: _Digest
    vector_from: _Text
    config_digest: _Digest
    computed_at_ms: _Count
    age_ms: _Age
    lag_ms: _Lag
    switching: bool


class FaultSeen(msgspec.Struct, frozen=True):
    code: Annotated[str, Meta(pattern=r"^[a-z_]{1,64}\Z")]
    detail: Annotated[str, Meta(max_length=4_096)] = ""


class VectorsAnswer(msgspec.Struct, frozen=True):
    """All of a node."""

    node: _Text
    boot_id: _Text
    active_models: _Count
    vectors: Annotated[dict[_Text, VectorSeen], Meta(max_length=MAX_DEPLOYMENTS)]
    faults: Annotated[dict[_Text, FaultSeen], Meta(max_length=MAX_DEPLOYMENTS)] = {}


class VectorAnswer(msgspec.Struct, frozen=True):
    """One deployment, with its entries if they were asked for."""

    node: _Text
    boot_id: _Text
    deployment: _Text
    model: _Text
    version: _Text
    checksum: _Digest
    slot: _Slot
    epoch: _Count
    vector_root: _Digest
    config_digest: _Digest
    computed_at_ms: _Count
    lag_ms: _Lag
    active_models: _Count
    switching: bool
    entries: Annotated[dict[str, _Entry], Meta(max_length=MAX_TENSORS)] | None = None
    vector_from: _Text = FROM_MEMORY  # a node of an earlier build, which knows no other kind, does not say it
    age_ms: _Age | None = None  # nor this, and reads its memory for every answer

    def __post_init__(self) -> None:
        _require_names(self.entries or ())

    def believed(self, limit_ms: int) -> NodeVector:
        """`limit_ms`: how old a reading can be that was made for this answer. Raises AgentFault."""
        age_ms = limit_ms if self.age_ms is None else self.age_ms
        _require(self.vector_from, age_ms, limit_ms)
        return msgspec.convert(msgspec.structs.replace(self, age_ms=age_ms), NodeVector, from_attributes=True)


class DigestsAnswer(msgspec.Struct, frozen=True):
    node: _Text
    boot_id: _Text
    deployment: _Text
    checksum: _Digest
    slot: _Slot
    epoch: _Count
    sha256: Annotated[dict[str, _Entry], Meta(max_length=MAX_TENSORS)]
    following: str

    def __post_init__(self) -> None:
        _require_names(self.sha256)
        _require_names((self.following,))


class BlocksAnswer(msgspec.Struct, frozen=True):
    tensor: str
    blocks: str


def believed(answer: VectorsAnswer, name: str, limit_ms: int) -> NodeVector | AgentFault:
    """What an answer says of one deployment; it may be `limit_ms` old."""
    seen = answer.vectors.get(name)
    if seen is None:
        fault = answer.faults.get(name)
        return AgentFault("bad_answer", f"the node left {name!r} out") if fault is None else AgentFault(fault.code, fault.detail[:500])
    try:
        _require(seen.vector_from, seen.age_ms, limit_ms)
    except AgentFault as fault:
        return fault
    return NodeVector(
        node=answer.node,
        boot_id=answer.boot_id,
        deployment=name,
        model=seen.model,
        version=seen.version,
        checksum=seen.checksum,
        slot=seen.slot,
        epoch=seen.epoch,
        vector_root=seen.vector_root,
        config_digest=seen.config_digest,
        computed_at_ms=seen.computed_at_ms,
        lag_ms=seen.lag_ms,
        active_models=answer.active_models,
        switching=seen.switching,
        age_ms=seen.age_ms,
    )


def decode(body: bytes, shape: type[T]) -> T:
    """Raises AgentFault bad_answer."""
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.MsgspecError, RecursionError) as cause:  # the latter for what is nested too deeply, also where it is skipped
        raise AgentFault("bad_answer", f"the answer cannot be read: {cause}") from cause


def _require_names(names: Iterable[str]) -> None:
    """Of tensors. Raises ValueError, which the library tells as its own."""
    for name in names:
        if len(name) > MAX_NAME_BYTES or len(name.encode()) > MAX_NAME_BYTES:
            raise ValueError(f"a tensor's name has more than {MAX_NAME_BYTES} bytes: {name[:80]!r}..")


def _require(vector_from: str, age_ms: int, limit_ms: int) -> None:
    if vector_from != FROM_MEMORY:
        raise AgentFault("attested", f"the vector is the word of the {vector_from}, not computed from the memory that serves")
    if age_ms > limit_ms:
        raise AgentFault("too_old", f"its memory was read {age_ms} ms ago, asked was for at most {limit_ms} ms")
