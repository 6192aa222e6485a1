"""Snapshots: the canonical bytes of a state, streamed.

A snapshot is a magic line and frames (kind, u32 length, payload): a header that describes itself, the records in the one order that FOLLOWS
allows, and the state hash. Equal states give equal bytes in every process; no map is walked for them, only the ordered sequences. Reading
trusts nothing: every frame must be canonical and in its place, and the hash over what was read must be the one at the end and nothing may
come after it. Anything else is RaftmetaError `integrity`, and no partial state is ever returned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from struct import Struct
from typing import Any, NoReturn, TypeVar

import msgspec
from rpds import HashTrieMap

from raftmeta.core import state as st
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.outcomes import Outcomes
from raftmeta.core.rollout import side_called, sides
from raftmeta.core.sequences import SortedKeys
from raftmeta.core.state import State, VersionItem, encode_record, version_key
from raftmeta.core.types import (
    Deployment,
    Evidence,
    ModelRecord,
    OutcomeRecord,
    Record,
    Rollout,
    SideName,
    Verdict,
    VerdictHistory,
    VersionRecord,
)

FORMAT = 1
MAGIC = b"raftmeta snapshot\n"
CHUNK_BYTES = 256 << 10  # of what snapshot_chunks yields: about a millisecond of encoding
MAX_FRAME_BYTES = 16 << 20  # a rollout over two full sides with the longest details stays below it
BULK = 1_024  # entries per call into a persistent map, for the sake of the interpreter lock

HEADER, MODEL, VERSION, MANIFEST, DEPLOYMENT, ROLLOUT, VERDICT, PAST, EVIDENCE, OUTCOME, END = b"HMVFDRCPNOE"
FOLLOWS: dict[int, bytes] = {
    HEADER: b"MDOE",
    MODEL: b"MVDOE",
    VERSION: b"F",
    MANIFEST: b"VMDOE",
    DEPLOYMENT: b"DRCNOE",
    ROLLOUT: b"RCNDOE",
    VERDICT: b"PNDOE",
    PAST: b"NDOE",
    EVIDENCE: b"NDOE",
    OUTCOME: b"OE",
    END: b"",
}
OF_A_DEPLOYMENT = (ROLLOUT, VERDICT, PAST, EVIDENCE)
_FRAME = Struct("<BI")
_END = Struct("<32sQ")

R = TypeVar("R", bound=Record)
V = TypeVar("V")


class Header(Record, frozen=True):
    format: int
    hash_schema: int
    scalars: st.Scalars


class StateDamaged(RaftmetaError):
    """The records in memory are not those that the state hash was made of: memory or code is at fault."""

    def __init__(self, revision: int, found: bytes, expected: bytes) -> None:
        super().__init__(
            "integrity", f"the records of revision {revision} have the state hash {found.hex()}, the state says {expected.hex()}"
        )


def snapshot_chunks(state: State) -> Iterator[bytes]:
    """The snapshot in pieces of CHUNK_BYTES, the last one shorter. Where it is cut says nothing.

    The hash is made anew from the records on the way. Raises StateDamaged instead of the last piece when it is not the state's.
    """
    buffer = bytearray(MAGIC)
    count, total = 0, st.leaf(st.SCALARS, "", encode_record(state.scalars))
    for kind, payload, leaf in _frames(state):
        count += 1
        total += leaf
        buffer += _FRAME.pack(kind, len(payload))
        buffer += payload
        while len(buffer) >= CHUNK_BYTES:
            yield bytes(buffer[:CHUNK_BYTES])
            del buffer[:CHUNK_BYTES]
    found, expected = (total & st.MODULUS_MASK).to_bytes(32, "big"), state.state_hash
    if found != expected:
        raise StateDamaged(state.revision, found, expected)
    buffer += _FRAME.pack(END, _END.size) + _END.pack(found, count)
    yield bytes(buffer)


def restore(chunks: Iterable[bytes]) -> State:
    """The state of a snapshot. Raises RaftmetaError `integrity` unless every byte is as `snapshot_chunks` wrote it."""
    builder = _Builder()
    for kind, payload in _read_frames(chunks):
        builder.take(kind, payload)
    return builder.finish()


def _frames(state: State) -> Iterator[tuple[int, bytes, int]]:
    """Kind, payload, and what the frame adds to the hash."""
    yield HEADER, encode_record(Header(FORMAT, st.HASH_SCHEMA, state.scalars)), 0
    for name in state.model_names:
        yield from _model_frames(state, name)
    for name in state.deployment_names:
        yield _record_frame(DEPLOYMENT, st.DEPLOYMENT, name, state.deployments[name])
        for rollout_id in state.history.get(name) or ():
            yield _record_frame(ROLLOUT, st.ROLLOUT, rollout_id, state.rollouts[rollout_id])
        verdict = state.verdicts.get(name)
        if verdict is not None:
            yield _record_frame(VERDICT, st.VERDICT, name, verdict)
        past = state.past_verdicts.get(name)
        if past is not None:
            yield _record_frame(PAST, st.PAST, name, past)
        if state.evidence:
            for node in sides(state.deployments[name]):
                key = st.evidence_key(name, node)
                evidence = state.evidence.get(key)
                if evidence is not None:
                    yield _record_frame(EVIDENCE, st.EVIDENCE, key, evidence)
    for request_id, record in state.outcomes.items():
        yield OUTCOME, bytes((len(request_id),)) + request_id.encode() + record, st.leaf(st.OUTCOME, request_id, record)


def _model_frames(state: State, name: str) -> Iterator[tuple[int, bytes, int]]:
    entry = state.catalog[name]
    yield MODEL, encode_record(entry.record), st.entry_leaf(entry)
    for _, label, manifest in entry.versions:
        key = version_key(name, label)
        payload = encode_record(state.versions[key])
        yield VERSION, payload, st.leaf(st.VERSION, key, st.version_image(payload, manifest))
        yield MANIFEST, manifest, 0


def _record_frame(kind: int, hashed_as: bytes, key: str, record: Record) -> tuple[int, bytes, int]:
    payload = encode_record(record)
    return kind, payload, st.leaf(hashed_as, key, payload)


def _read_frames(chunks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Frames up to the end of the stream, wherever the chunks were cut."""
    buffer = bytearray()
    place = -1  # of the next frame in the buffer, -1 before the magic
    for chunk in chunks:
        buffer += chunk
        if place < 0:
            if len(buffer) < len(MAGIC):
                continue
            _require(buffer.startswith(MAGIC), "the snapshot does not begin with its magic line")
            place = len(MAGIC)
        length = len(buffer)
        with memoryview(buffer) as view:  # one copy of each payload
            while length - place >= _FRAME.size:
                kind, size = _FRAME.unpack_from(view, place)
                if size > MAX_FRAME_BYTES:
                    _refuse(f"a frame of {size} bytes, the limit is {MAX_FRAME_BYTES}")
                begin, end = place + _FRAME.size, place + _FRAME.size + size
                if end > length:
                    break
                yield kind, bytes(view[begin:end])
                place = end
        del buffer[:place]
        place = 0
    _require(place == 0 and not buffer, f"the snapshot is cut: {len(buffer)} bytes of a frame at its end")


class _Map:
    """A persistent map that is filled in bulk."""

    def __init__(self) -> None:
        self._map: HashTrieMap[str, Any] = HashTrieMap()
        self._fresh: dict[str, Any] = {}

    def add(self, key: str, value: object) -> None:
        if key in self._fresh:
            _refuse(f"key {key!r} stands twice")
        self._fresh[key] = value
        if len(self._fresh) == BULK:
            self.finish()

    def finish(self) -> HashTrieMap[str, Any]:
        before, fresh = self._map, self._fresh
        self._map, self._fresh = before.update(fresh), {}
        if len(self._map) != len(before) + len(fresh):
            _refuse(f"key {next(key for key in fresh if key in before)!r} stands twice")
        return self._map


class _Builder:
    """Takes frames in order and puts the state together."""

    def __init__(self) -> None:
        self._take: dict[int, Callable[[bytes], None]] = {
            HEADER: self._header,
            MODEL: self._model,
            VERSION: self._version,
            MANIFEST: self._manifest,
            DEPLOYMENT: self._deployment,
            ROLLOUT: self._rollout,
            VERDICT: self._verdict,
            PAST: self._past,
            EVIDENCE: self._evidence,
            OUTCOME: self._outcome,
            END: self._end,
        }
        self._allowed = bytes((HEADER,))
        self._frames = 0
        self._hash_sum = 0
        self._size_bytes = 0
        self._scalars: st.Scalars | None = None
        self._model_now: ModelRecord | None = None
        self._version_now: VersionRecord | None = None
        self._version_bytes = b""  # of it
        self._deployment_now: Deployment | None = None
        self._order_now: list[VersionItem] = []  # versions of the model at hand
        self._history_now: list[str] = []  # rollouts of the deployment at hand
        self._places_now: dict[str, SideName] = {}  # nodes of the deployment that evidence came of
        self._nodes_left: Iterator[str] = iter(())  # those that may still come, in order
        self._evidence_of = ""  # deployment that those nodes are of
        self._last_revision = 0  # of the rollout or outcome before
        self._catalog, self._versions = _Map(), _Map()
        self._deployments, self._rollouts, self._verdicts, self._history = _Map(), _Map(), _Map(), _Map()
        self._pasts, self._evidences = _Map(), _Map()
        self._verdict_now: Verdict | None = None
        self._model_names: list[str] = []
        self._deployment_names: list[str] = []
        self._outcomes: dict[str, bytes] = {}
        self._state: State | None = None

    def take(self, kind: int, payload: bytes) -> None:
        if kind not in self._allowed:
            _refuse(f"frame {self._frames} is {bytes((kind,))!r}, expected one of {self._allowed!r}")
        if kind not in (VERSION, MANIFEST):
            self._close_model()
        if kind not in OF_A_DEPLOYMENT:
            self._close_deployment()
        self._take[kind](payload)
        self._allowed = FOLLOWS[kind]
        self._frames += 1

    def finish(self) -> State:
        if self._state is None:
            raise RaftmetaError("integrity", "the snapshot has no end")
        return self._state

    def _header(self, payload: bytes) -> None:
        header = _decode(_headers, payload)
        level = header.scalars.feature_level
        _require(header.format == FORMAT, f"snapshot format {header.format}, this build reads {FORMAT}")
        _require(header.hash_schema == st.HASH_SCHEMA, f"hash schema {header.hash_schema}, this build knows {st.HASH_SCHEMA}")
        _require(level <= st.SUPPORTED_FEATURE_LEVEL, f"feature level {level}, this build knows up to {st.SUPPORTED_FEATURE_LEVEL}")
        self._scalars = header.scalars

    def _model(self, payload: bytes) -> None:
        model = _decode(_models, payload)
        _require(not self._model_names or self._model_names[-1] < model.name, f"model {model.name!r} is out of order")
        self._model_names.append(model.name)
        self._model_now = model

    def _version(self, payload: bytes) -> None:
        version = _decode(_versions, payload)
        model = self._model_now
        assert model is not None  # FOLLOWS lets a version come only after its model
        if version.model != model.name:
            _refuse(f"version of model {version.model!r} among those of {model.name!r}")
        before = self._order_now[-1][0] if self._order_now else 0
        if not before < version.number <= model.last_number:
            _refuse(f"version number {version.number} of {model.name!r} is out of order")
        self._version_now, self._version_bytes = version, payload

    def _manifest(self, payload: bytes) -> None:
        version = self._version_now
        assert version is not None  # FOLLOWS lets a manifest come only after its version
        digest = hashlib.sha256(payload).digest()
        key = version_key(version.model, version.label)
        if digest.hex() != version.summary.manifest_digest:
            _refuse(f"the manifest of {key!r} is not the published one")
        self._order_now.append((version.number, version.label, payload))
        self._versions.add(key, version)
        self._count(st.VERSION, key, self._version_bytes + digest, len(self._version_bytes) + len(payload))

    def _close_model(self) -> None:
        model, order = self._model_now, self._order_now
        if model is None:
            return
        _require(model.version_count == len(order), f"model {model.name!r} has {len(order)} versions, expected {model.version_count}")
        gap = model.last_number - (order[-1][0] if order else 0)
        leaf = st.model_leaf(model, gap, 0)
        self._hash_sum += leaf
        self._size_bytes += len(model.name) + st.MODEL_BYTES
        self._catalog.add(model.name, st.ModelEntry(model, gap, leaf, st.NO_VERSIONS.extended(order)))
        self._model_now, self._order_now = None, []

    def _deployment(self, payload: bytes) -> None:
        deployment = _decode(_deployments, payload)
        names = self._deployment_names
        _require(not names or names[-1] < deployment.name, f"deployment {deployment.name!r} is out of order")
        names.append(deployment.name)
        self._deployment_now = deployment
        self._last_revision = 0
        self._record(st.DEPLOYMENT, self._deployments, deployment.name, deployment, payload)

    def _rollout(self, payload: bytes) -> None:
        rollout = _decode(_rollouts, payload)
        deployment = self._deployment_now
        assert deployment is not None  # FOLLOWS
        _require(rollout.deployment == deployment.name, f"rollout {rollout.id!r} of another deployment than {deployment.name!r}")
        revision = rollout.started_revision
        _require(self._last_revision < revision, f"rollout {rollout.id!r} of revision {revision} is out of order")
        self._last_revision = revision
        self._history_now.append(rollout.id)
        self._record(st.ROLLOUT, self._rollouts, rollout.id, rollout, payload)

    def _verdict(self, payload: bytes) -> None:
        verdict = _decode(_verdicts, payload)
        deployment = self._deployment_now
        assert deployment is not None  # FOLLOWS
        _require(verdict.deployment == deployment.name, f"a verdict of another deployment than {deployment.name!r}")
        self._verdict_now = verdict
        self._record(st.VERDICT, self._verdicts, verdict.deployment, verdict, payload)

    def _past(self, payload: bytes) -> None:
        past = _decode(_pasts, payload)
        last = self._verdict_now
        assert last is not None  # FOLLOWS lets a history come only after the last verdict
        _require(past.deployment == last.deployment, f"verdicts of another deployment than {last.deployment!r}")
        revisions = [past.dropped_revision, *(item.revision for item in past.items), last.revision]
        rising = all(one < other for one, other in pairwise(revisions))
        _require(bool(past.items) and rising, f"verdicts of deployment {last.deployment!r} are out of order")
        self._record(st.PAST, self._pasts, past.deployment, past, payload)

    def _evidence(self, payload: bytes) -> None:
        evidence = _decode(_evidences, payload)
        deployment = self._deployment_now
        assert deployment is not None  # FOLLOWS
        _require(evidence.deployment == deployment.name, f"evidence of another deployment than {deployment.name!r}")
        if self._evidence_of != deployment.name:
            self._evidence_of, self._places_now = deployment.name, sides(deployment)
            self._nodes_left = iter(self._places_now)
        node = evidence.node
        if self._places_now.get(node) is not evidence.side or side_called(deployment, evidence.side).zone != evidence.zone:
            _refuse(f"evidence of node {node!r}, which has another place in deployment {deployment.name!r}")
        _require(node in self._nodes_left, f"evidence of node {node!r} is out of order")  # takes those before it, which have none
        self._record(st.EVIDENCE, self._evidences, st.evidence_key(deployment.name, node), evidence, payload)

    def _close_deployment(self) -> None:
        deployment, history = self._deployment_now, self._history_now
        if deployment is None:
            return
        _require([deployment.rollout_id] == (history[-1:] or [""]), f"the last rollout of deployment {deployment.name!r} is not its own")
        if history:
            self._history.add(deployment.name, tuple(history))
        self._deployment_now, self._history_now, self._last_revision = None, [], 0

    def _outcome(self, payload: bytes) -> None:
        size = payload[0] if payload else 0
        name, record = payload[1 : 1 + size], payload[1 + size :]
        if not name.isascii():
            _refuse(f"outcome {len(self._outcomes)} has no readable key")
        key = name.decode("ascii")
        outcome = _decode(_outcomes, record)
        if outcome.revision <= self._last_revision:
            _refuse(f"outcome {key!r} of revision {outcome.revision} is out of order")
        self._last_revision = outcome.revision
        if key in self._outcomes:
            _refuse(f"outcome {key!r} stands twice")
        self._outcomes[key] = record
        self._count(st.OUTCOME, key, record, len(record))

    def _record(self, kind: bytes, records: _Map, key: str, value: Record, payload: bytes) -> None:
        records.add(key, value)
        self._count(kind, key, payload, len(payload))

    def _count(self, kind: bytes, key: str, image: bytes, size_bytes: int) -> None:
        self._hash_sum += st.leaf(kind, key, image)
        self._size_bytes += len(key) + size_bytes

    def _end(self, payload: bytes) -> None:
        scalars = self._scalars
        assert scalars is not None  # FOLLOWS lets nothing come before the header
        _require(len(payload) == _END.size, f"an end of {len(payload)} bytes, expected {_END.size}")
        digest, count = _END.unpack(payload)
        _require(count == self._frames, f"the snapshot has {self._frames} frames, its end says {count}")
        state = State(
            revision=scalars.revision,
            generation=scalars.generation,
            feature_level=scalars.feature_level,
            cluster_ms=scalars.cluster_ms,
            keys_after_ms=scalars.keys_after_ms,
            limits=scalars.limits,
            catalog=self._catalog.finish(),
            versions=self._versions.finish(),
            deployments=self._deployments.finish(),
            rollouts=self._rollouts.finish(),
            verdicts=self._verdicts.finish(),
            past_verdicts=self._pasts.finish(),
            evidence=self._evidences.finish(),
            outcomes=Outcomes.of(self._outcomes.items()),
            model_names=SortedKeys[str]().extended(self._model_names),
            deployment_names=SortedKeys[str]().extended(self._deployment_names),
            history=self._history.finish(),
            size_bytes=self._size_bytes,
            hash_sum=self._hash_sum & st.MODULUS_MASK,
        )
        found = state.state_hash
        _require(found == digest, f"the state hash is {found.hex()}, the snapshot says {digest.hex()}")
        self._state = state


def _require(holds: bool, detail: str) -> None:
    if not holds:
        _refuse(detail)


def _refuse(detail: str) -> NoReturn:
    """What stands once for each of many records calls this, and does not make the words of a fault that is not there."""
    raise RaftmetaError("integrity", detail)


def _decode(decoder: msgspec.msgpack.Decoder[R], payload: bytes) -> R:
    """The record of these bytes, which must be the canonical ones: the hash is later changed by encoding it again."""
    try:
        record = decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as cause:
        raise RaftmetaError("integrity", f"a frame cannot be read: {cause}") from cause
    if encode_record(record) != payload:
        _refuse(f"a {type(record).__name__} is not in canonical form")
    return record


_headers = msgspec.msgpack.Decoder(Header)
_models = msgspec.msgpack.Decoder(ModelRecord)
_versions = msgspec.msgpack.Decoder(VersionRecord)
_deployments = msgspec.msgpack.Decoder(Deployment)
_rollouts = msgspec.msgpack.Decoder(Rollout)
_verdicts = msgspec.msgpack.Decoder(Verdict)
_pasts = msgspec.msgpack.Decoder(VerdictHistory)
_evidences = msgspec.msgpack.Decoder(Evidence)
_outcomes = msgspec.msgpack.Decoder(OutcomeRecord)
