"""The cluster state: an immutable value over persistent maps, with its hash.

The hash is the sum modulo 2**256 of SHA-256 over each (kind, key, record), lengths first, so a command changes it by subtracting what it
replaced and adding what it wrote. It detects replicas that differ; it is not meant to withstand somebody who may choose records at will.
A manifest enters by the SHA-256 of its bytes, an outcome by its encoded record, the counters and limits as one record of their own.
What the maps cannot give in order (pages, eviction) stands in the sequences, which are derived and enter neither hash nor snapshot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from struct import Struct

import msgspec
from rpds import HashTrieMap

from raftmeta.core.sequences import Fifo, SortedKeys
from raftmeta.core.types import Deployment, Limits, ModelRecord, OutcomeRecord, Record, Rollout, Verdict, VersionRecord

HASH_SCHEMA = 1
SUPPORTED_FEATURE_LEVEL = 1  # highest level this build knows
MODULUS_MASK = (1 << 256) - 1
MAX_INT = (1 << 63) - 1  # every integer of the state lies in 0..MAX_INT

_DOMAIN = f"raftmeta state {HASH_SCHEMA}\0".encode()
MODEL, VERSION, MANIFEST, DEPLOYMENT, ROLLOUT, VERDICT, OUTCOME, SCALARS = (_DOMAIN + bytes((kind,)) for kind in b"mvfdrcos")

encode_record = msgspec.msgpack.Encoder(order="deterministic").encode
decode_outcome = msgspec.msgpack.Decoder(OutcomeRecord).decode

_lengths = Struct("<II").pack
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


class State(msgspec.Struct, frozen=True, eq=False):
    revision: int
    generation: int
    feature_level: int
    cluster_ms: int  # highest stamped time of a command that was applied; the clock of every record
    keys_after_ms: int  # time carried by the newest dropped outcome key; keys at or before it are refused
    limits: Limits
    models: HashTrieMap[str, ModelRecord]  # by name
    versions: HashTrieMap[str, VersionRecord]  # by "model/label"
    manifests: HashTrieMap[str, bytes]  # packed, by "model/label"; one for each version
    deployments: HashTrieMap[str, Deployment]  # by name
    rollouts: HashTrieMap[str, Rollout]  # by id
    verdicts: HashTrieMap[str, Verdict]  # by deployment
    outcomes: HashTrieMap[str, bytes]  # encoded OutcomeRecord by idempotency key; see `outcome`
    model_names: SortedKeys[str]
    deployment_names: SortedKeys[str]
    version_order: HashTrieMap[str, SortedKeys[tuple[int, str]]]  # (number, label) by model; models without versions are absent
    history: HashTrieMap[str, tuple[str, ...]]  # rollout ids by deployment, oldest first
    outcome_order: Fifo
    size_bytes: int  # of all keys, records and manifests
    hash_sum: int  # of all records without the scalars

    @classmethod
    def empty(cls, limits: Limits | None = None) -> State:
        """The state before the first command."""
        return cls(
            revision=0,
            generation=0,
            feature_level=1,
            cluster_ms=0,
            keys_after_ms=0,
            limits=limits or Limits(),
            models=HashTrieMap(),
            versions=HashTrieMap(),
            manifests=HashTrieMap(),
            deployments=HashTrieMap(),
            rollouts=HashTrieMap(),
            verdicts=HashTrieMap(),
            outcomes=HashTrieMap(),
            model_names=SortedKeys(),
            deployment_names=SortedKeys(),
            version_order=HashTrieMap(),
            history=HashTrieMap(),
            outcome_order=Fifo(),
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

    def outcome(self, request_id: str) -> OutcomeRecord | None:
        """What the command with this idempotency key was answered, while it is kept."""
        record = self.outcomes.get(request_id)
        return None if record is None else decode_outcome(record)

    def next_generation(self) -> State:
        """The state after a forced recovery or a restore: orders of the old generation are fenced off."""
        return msgspec.structs.replace(self, generation=self.generation + 1)


def version_key(model: str, label: str) -> str:
    return f"{model}/{label}"


def leaf(kind: bytes, key: str, record: bytes) -> int:
    """What one record adds to the hash."""
    name = key.encode()
    return _to_int(_sha256(b"".join((kind, _lengths(len(name), len(record)), name, record))).digest(), "big")


def manifest_image(manifest: bytes) -> bytes:
    """What stands for a manifest in the hash."""
    return _sha256(manifest).digest()


def recompute_hash(state: State) -> bytes:
    """The state hash from the records alone; equal to `state_hash` unless memory or code is at fault."""
    total = leaf(SCALARS, "", encode_record(state.scalars))
    for kind, key, record in _records(state):
        total += leaf(kind, key, record)
    return (total & MODULUS_MASK).to_bytes(32, "big")


def _records(state: State) -> Iterator[tuple[bytes, str, bytes]]:
    """Every record as it enters the hash, in any order: a sum does not mind."""
    for kind, records in (
        (MODEL, state.models),
        (VERSION, state.versions),
        (DEPLOYMENT, state.deployments),
        (ROLLOUT, state.rollouts),
        (VERDICT, state.verdicts),
    ):
        for key, record in records.items():
            yield kind, key, encode_record(record)
    for key, manifest in state.manifests.items():
        yield MANIFEST, key, manifest_image(manifest)
    for key, outcome in state.outcomes.items():
        yield OUTCOME, key, outcome
