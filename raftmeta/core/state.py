"""The cluster state: an immutable value over persistent maps, with its hash.

The hash is the sum modulo 2**256 of SHA-256 over each (kind, key, record), lengths first, so a command changes it by subtracting what it
replaced and adding what it wrote. It detects replicas that differ; it is not meant to withstand somebody who may choose records at will.
A manifest enters by the SHA-256 of its bytes, together with its version; the counters and limits are one record of their own.
What the maps cannot give in order (pages, eviction) stands in the sequences, which are derived and enter neither hash nor snapshot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from struct import Struct

import msgspec
from rpds import HashTrieMap

from raftmeta.core.canonical import CANONICAL
from raftmeta.core.outcomes import Outcomes
from raftmeta.core.sequences import SortedKeys
from raftmeta.core.types import (
    Deployment,
    Evidence,
    Limits,
    ModelRecord,
    OutcomeRecord,
    Record,
    Rollout,
    Verdict,
    VerdictHistory,
    VersionRecord,
)

HASH_SCHEMA = 1
SUPPORTED_FEATURE_LEVEL = 2  # highest level this build knows
MODULUS_MASK = (1 << 256) - 1
MAX_INT = (1 << 63) - 1  # every integer of the state lies in 0..MAX_INT

MODEL_BYTES = 64  # what a model's record counts for in the quota, whatever its counters say

VersionItem = tuple[int, str, bytes]  # number, label, packed manifest
NO_VERSIONS: SortedKeys[VersionItem] = SortedKeys()

_DOMAIN = f"raftmeta state {HASH_SCHEMA}\0".encode()
MODEL, VERSION, DEPLOYMENT, ROLLOUT, VERDICT, OUTCOME, SCALARS, EVIDENCE, PAST = (_DOMAIN + bytes((kind,)) for kind in b"mvdrcosep")

_encode = msgspec.msgpack.Encoder(order="deterministic").encode
decode_outcome = msgspec.msgpack.Decoder(OutcomeRecord).decode

lengths = Struct("<II").pack
_sha256 = hashlib.sha256
_to_int = int.from_bytes


class Scalars(Record, frozen=True):
    """What the state holds beside its maps."""

    revision: int
    generation: int
    feature_level: int
    cluster_ms: int
    keys_after_ms: int
    limits: Limits


class ModelImage(Record, frozen=True):
    """What stands for a model in the hash: what its versions do not say."""

    gap: int  # how far the last number lies above the highest that is there
    missing: int  # versions that the counter counts and nobody finds: always 0
    created_revision: int
    created_ms: int


class ModelEntry(msgspec.Struct, frozen=True, gc=False):
    """A model with its versions, and with what would be dear to find again at every publish."""

    record: ModelRecord
    gap: int
    leaf: int  # of its image
    versions: SortedKeys[VersionItem]


class State(msgspec.Struct, frozen=True, eq=False):
    """Attributes are read, never assigned; `apply` makes the next state."""

    revision: int
    generation: int
    feature_level: int
    cluster_ms: int  # highest stamped time of a command that was applied; the clock of every record
    keys_after_ms: int  # time carried by the newest dropped outcome key; keys at or before it are refused
    limits: Limits
    catalog: HashTrieMap[str, ModelEntry]  # models by name; read it as `models`, `manifests` and `versions_of`
    versions: HashTrieMap[str, VersionRecord]  # by "model/label"
    deployments: HashTrieMap[str, Deployment]  # by name
    rollouts: HashTrieMap[str, Rollout]  # by id
    verdicts: HashTrieMap[str, Verdict]  # by deployment
    past_verdicts: HashTrieMap[str, VerdictHistory]  # by deployment, of those that had more than one
    evidence: HashTrieMap[str, Evidence]  # by "deployment/node"
    outcomes: Outcomes  # encoded OutcomeRecord by idempotency key
    model_names: SortedKeys[str]
    deployment_names: SortedKeys[str]
    history: HashTrieMap[str, tuple[str, ...]]  # rollout ids by deployment, oldest first
    size_bytes: int  # of all keys, records and manifests
    hash_sum: int  # of all records without the scalars

    @classmethod
    def empty(cls, limits: Limits | None = None) -> State:
        """The state before the first command."""
        limits = limits or Limits()
        assert limits.max_outcomes > 0, limits  # a command needs room for its own outcome
        return cls(
            revision=0,
            generation=0,
            feature_level=1,
            cluster_ms=0,
            keys_after_ms=0,
            limits=limits,
            catalog=HashTrieMap(),
            versions=HashTrieMap(),
            deployments=HashTrieMap(),
            rollouts=HashTrieMap(),
            verdicts=HashTrieMap(),
            past_verdicts=HashTrieMap(),
            evidence=HashTrieMap(),
            outcomes=Outcomes.of(),
            model_names=SortedKeys(),
            deployment_names=SortedKeys(),
            history=HashTrieMap(),
            size_bytes=0,
            hash_sum=0,
        )

    @property
    def scalars(self) -> Scalars:
        return Scalars(self.revision, self.generation, self.feature_level, self.cluster_ms, self.keys_after_ms, self.limits)

    @property
    def state_hash(self) -> bytes:
        """32 bytes; equal for equal states in every process."""
        total = self.hash_sum + leaf(SCALARS, "", encode_record(self.scalars))
        return (total & MODULUS_MASK).to_bytes(32, "big")

    @property
    def models(self) -> Mapping[str, ModelRecord]:
        """Models by name."""
        return Models(self.catalog)

    def versions_of(self, model: str) -> SortedKeys[VersionItem]:
        """Number, label and packed manifest of a model's versions by number; empty for an unknown model."""
        entry = self.catalog.get(model)
        return NO_VERSIONS if entry is None else entry.versions

    @property
    def manifests(self) -> Mapping[str, bytes]:
        """Packed manifests by "model/label", one for each version."""
        return Manifests(self)

    def outcome(self, request_id: str) -> OutcomeRecord | None:
        """What the command with this idempotency key was answered, while it is kept."""
        record = self.outcomes.get(request_id)
        return None if record is None else decode_outcome(record)

    def next_generation(self) -> State:
        """The state after a forced recovery or a restore: orders of the old generation are fenced off."""
        return msgspec.structs.replace(self, generation=self.generation + 1)


class Models(Mapping[str, ModelRecord]):
    """The models of a catalog as a map."""

    __slots__ = ("_catalog",)

    def __init__(self, catalog: HashTrieMap[str, ModelEntry]) -> None:
        self._catalog = catalog

    def __getitem__(self, key: str) -> ModelRecord:
        return self._catalog[key].record

    def __iter__(self) -> Iterator[str]:
        return iter(self._catalog)

    def __len__(self) -> int:
        return len(self._catalog)


class Manifests(Mapping[str, bytes]):
    """The manifests of a state as a map; they stand in the catalog, which spares a second persistent map."""

    __slots__ = ("_state",)

    def __init__(self, state: State) -> None:
        self._state = state

    def __getitem__(self, key: str) -> bytes:
        version = self._state.versions[key]
        return self._state.versions_of(version.model).first_after((version.number,))[2]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state.versions)

    def __len__(self) -> int:
        return len(self._state.versions)


def encode_record(record: Record) -> bytes:
    """Canonical bytes of a record."""
    stands_for = CANONICAL.get(type(record))
    return _encode(record if stands_for is None else stands_for(record))


def version_key(model: str, label: str) -> str:
    return f"{model}/{label}"


def evidence_key(deployment: str, node: str) -> str:
    return f"{deployment}/{node}"


def leaf(kind: bytes, key: str, record: bytes) -> int:
    """What one record adds to the hash."""
    name = key.encode()
    return _to_int(_sha256(b"".join((kind, lengths(len(name), len(record)), name, record))).digest(), "big")


def model_leaf(model: ModelRecord, gap: int, missing: int) -> int:
    """What a model adds to the hash; see ModelImage."""
    return leaf(MODEL, model.name, encode_record(ModelImage(gap, missing, model.created_revision, model.created_ms)))


def entry_leaf(entry: ModelEntry) -> int:
    """What a model adds to the hash, from its record and the versions that are there."""
    model, versions = entry.record, entry.versions
    highest = versions.last[0] if len(versions) else 0
    return model_leaf(model, model.last_number - highest, model.version_count - len(versions))


def version_image(record: bytes, manifest: bytes) -> bytes:
    """What stands for a version in the hash: its encoded record and the SHA-256 of its manifest's bytes."""
    return record + _sha256(manifest).digest()
