"""Commands for tests of the core: builders, a world that applies them and checks what must always hold, and hypothesis strategies.

`World.refused` is how a refusal is tested: it also checks that nothing changed but the revision and the stored outcome. The strategy
`payload_lists` mixes absurd commands with helpful ones, which it reads off the state as it goes, so that rollouts reach every phase.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import strategies as hs

from raftmeta import codec
from raftmeta.core import commands as c
from raftmeta.core.apply import apply, apply_batch
from raftmeta.core.events import Event
from raftmeta.core.handlers.verdicts import MAX_PAST, MAX_PAST_BYTES, VERDICTS
from raftmeta.core.rollout import ROWS, decide, side_called, sides, waiting_for
from raftmeta.core.state import MODEL_BYTES, SUPPORTED_FEATURE_LEVEL, State, encode_record, evidence_key
from raftmeta.core.types import (
    Basis,
    DrainOverdue,
    Limits,
    Outcome,
    Phase,
    Policy,
    Rollout,
    RolloutStatus,
    Side,
    SideName,
    Stage,
    StageCounters,
    VectorFrom,
    VersionSummary,
)
from tests.support.state_hash import recompute_hash

NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
SMALL = Limits(
    quota_bytes=20_000,
    max_models=2,
    max_versions_per_model=3,
    max_deployments=2,
    max_nodes_per_side=3,
    max_rollouts_per_deployment=3,
    max_outcomes=6,
)


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def publication(model: str = "m", label: str = "1", content: str = "", manifest: bytes = b"") -> c.Publish:
    """A sound publication; `content` tells apart what the same label could hold."""
    packed = manifest or f"manifest of {model} {label} {content}".encode()
    part = f"{model} {label} {content}"
    summary = VersionSummary(
        checksum=digest_of(f"checksum {part}"),
        config_digest=digest_of(f"config {part}"),
        weights_digest=digest_of(f"weights {part}"),
        vector_root=digest_of(f"root {part}"),
        manifest_digest=hashlib.sha256(packed).hexdigest(),
        size_bytes=1_000,
        weights_bytes=900,
        file_count=3,
        tensor_count=7,
    )
    return c.Publish(model, label, summary, packed)


def declaration(
    name: str = "d", model: str = "m", primary: Sequence[str] = ("a1", "a2"), standby: Sequence[str] = ("b1",)
) -> c.DeclareDeployment:
    return c.DeclareDeployment(name, model, Side("a", tuple(primary)), Side("b", tuple(standby)) if standby else None, Policy())


def attestation(rollout: Rollout, node: str, side: SideName, stage: Stage, **changes: Any) -> c.Attest:
    root = "" if stage is Stage.PREPARED else rollout.vector_root
    code = "out_of_memory" if stage is Stage.FAILED else ""
    body = c.Attest(rollout.id, node, side, stage, rollout.checksum, root, "boot-1", StageCounters(), code, "")
    return msgspec.structs.replace(body, **changes)


def evidence(node: str = "a1", version: str = "1", **changes: Any) -> c.RecordEvidence:
    """Of a node that serves what was published as this version of model m."""
    summary = publication("m", version).summary
    body = c.RecordEvidence(
        deployment="d",
        node=node,
        generation=0,
        order_revision=0,
        version=version,
        checksum=summary.checksum,
        vector_root=summary.vector_root,
        vector_from=VectorFrom.MEMORY,
        derived_digest="",
        config_digest=summary.config_digest,
        tokenizer_digest="",
        boot_id="boot-1",
        told_ms=1_000,
        verified_age_ms=250,
        finding="",
    )
    return msgspec.structs.replace(body, **changes)


def check(state: State, verdict: str = "consistent", deployment: str = "d", report: bytes = b"{}", **changes: Any) -> c.RecordCheck:
    """What a check that begins now finds."""
    seen = state.deployments[deployment]
    basis = Basis(state.generation, seen.order_revision, seen.version, state.revision, len(sides(seen)))
    return c.RecordCheck(deployment, verdict, f"{verdict} summary", report, msgspec.structs.replace(basis, **changes))


def at_level(state: State, level: int = SUPPORTED_FEATURE_LEVEL) -> State:
    return msgspec.structs.replace(state, feature_level=level)


def snapshot(state: State) -> bytes:
    return b"".join(codec.snapshot_chunks(state))


def facts(state: State) -> list[bytes]:
    """Everything a refusal must leave alone: the records without outcomes, and the scalars it may not move."""
    records = [encode_record(state.models[name]) for name in state.model_names]
    for name in state.model_names:
        for _, label, manifest in state.versions_of(name):
            records += [encode_record(state.versions[f"{name}/{label}"]), manifest]
    for name in state.deployment_names:
        records.append(encode_record(state.deployments[name]))
        records += [encode_record(state.rollouts[each]) for each in state.history.get(name) or ()]
        records += [encode_record(state.verdicts[name])] if name in state.verdicts else []
        records += [encode_record(state.past_verdicts[name])] if name in state.past_verdicts else []
        keys = [evidence_key(name, node) for node in sides(state.deployments[name])]
        records += [encode_record(state.evidence[key]) for key in keys if key in state.evidence]
    return [*records, b"%d %d" % (state.generation, state.feature_level)]


class World:
    """A state and a clock; every command is checked against what must always hold."""

    def __init__(self, limits: Limits | None = None, level: int = 1) -> None:
        self.state = at_level(State.empty(limits), level)
        self.now_ms = NOW_MS
        self.events: tuple[Event, ...] = ()
        self._keys = 0

    def do(self, body: c.Body, key: str = "", principal: str = "publisher") -> Outcome:
        self._keys += 1
        self.now_ms += 1
        command = c.Command(c.SCHEMA, key or f"key-{self._keys}", principal, "member-a", self.now_ms, body)
        before = self.state
        self.state, outcome, self.events = apply(before, command)
        check_state(self.state)
        moved = 0 if self.state is before else 1
        assert self.state.revision >= before.revision + moved
        return outcome

    def ok(self, body: c.Body, key: str = "", principal: str = "publisher") -> dict[str, Any]:
        """The result of a command that must succeed."""
        outcome = self.do(body, key, principal)
        assert outcome.code == "ok", outcome
        return msgspec.msgpack.decode(outcome.result) if outcome.result else {}

    def refused(self, code: str, body: c.Body, key: str = "", principal: str = "publisher") -> Outcome:
        before = self.state
        outcome = self.do(body, key, principal)
        assert outcome.code == code, outcome
        assert outcome.detail
        assert facts(self.state) == facts(before)
        assert self.events == ()
        assert self.state.revision == before.revision + 1
        return outcome

    def rollout(self, rollout_id: str) -> Rollout:
        return self.state.rollouts[rollout_id]

    def attest(self, rollout_id: str, stage: Stage, only: Sequence[str] = ()) -> None:
        """By every node, or by these."""
        rollout = self.rollout(rollout_id)
        for node, side in sides(self.state.deployments[rollout.deployment]).items():
            if not only or node in only:
                self.ok(attestation(rollout, node, side, stage))

    def advance(self, rollout_id: str) -> Phase:
        self.ok(c.AdvanceRollout(rollout_id, self.rollout(rollout_id).phase))
        return self.rollout(rollout_id).phase

    def start(self, version: str, rollout_id: str, deployment: str = "d") -> None:
        self.ok(c.Activate(deployment, version, None, rollout_id))

    def reach(self, rollout_id: str, phase: Phase) -> None:
        """Carry a started rollout on to a phase."""
        while self.rollout(rollout_id).phase is not phase:
            gate = ROWS[self.rollout(rollout_id).phase].gate
            assert gate is not None
            self.attest(rollout_id, gate)
            self.advance(rollout_id)

    def use_up_quota(self) -> None:
        """From here on nothing fits."""
        limits = msgspec.structs.replace(self.state.limits, quota_bytes=self.state.size_bytes)
        self.state = msgspec.structs.replace(self.state, limits=limits)

    def serve(self, version: str, rollout_id: str, deployment: str = "d") -> None:
        self.start(version, rollout_id, deployment)
        self.reach(rollout_id, Phase.ACTIVE)


def serving_world(limits: Limits | None = None, level: int = 1) -> World:
    """Model m with versions 1 and 2, deployment d over two zones, nothing activated."""
    world = World(limits, level)
    world.ok(publication("m", "1"))
    world.ok(publication("m", "2"))
    world.ok(declaration())
    return world


def check_state(state: State) -> None:
    """What must hold of every state that apply makes."""
    assert recompute_hash(state) == state.state_hash
    records = [(name, bytes(MODEL_BYTES)) for name in state.models]
    for table in (state.versions, state.deployments, state.rollouts, state.verdicts, state.past_verdicts, state.evidence):
        records += [(key, encode_record(value)) for key, value in table.items()]
    records += [*state.manifests.items()]
    size = sum(len(key) + len(record) for key, record in records) - sum(map(len, state.manifests))
    assert state.size_bytes == size + sum(len(key) + len(record) for key, record in state.outcomes.items())
    assert list(state.model_names) == sorted(state.models)
    assert list(state.deployment_names) == sorted(state.deployments)
    for name, model in state.models.items():
        order = [(number, label) for number, label, _ in state.versions_of(name)]
        found = sorted((version.number, version.label) for version in state.versions.values() if version.model == name)
        assert order == found
        assert model.version_count == len(found)
        assert model.last_number >= max((number for number, _ in found), default=0)
    kept = [each for name in state.deployment_names for each in state.history.get(name) or ()]
    assert sorted(kept) == sorted(state.rollouts)
    for deployment in state.deployments.values():
        assert deployment.serving_side is (SideName.PRIMARY if deployment.failover is None else deployment.failover.to)
        assert deployment.standby is not None or deployment.serving_side is SideName.PRIMARY
    for name, past in state.past_verdicts.items():
        kept_revisions = [past.dropped_revision, *(item.revision for item in past.items), state.verdicts[name].revision]
        assert kept_revisions == sorted(set(kept_revisions)) and 0 < len(past.items) <= MAX_PAST
        assert sum(len(encode_record(item)) for item in past.items) <= MAX_PAST_BYTES
    for key, evidence in state.evidence.items():
        deployment = state.deployments[evidence.deployment]
        assert key == evidence_key(deployment.name, evidence.node)
        assert sides(deployment)[evidence.node] is evidence.side
        assert side_called(deployment, evidence.side).zone == evidence.zone


def command_bytes(body: c.Body, key: str, stamped_ms: int = NOW_MS, principal: str = "publisher") -> bytes:
    return c.encode(c.Command(c.SCHEMA, key, principal, "member-a", stamped_ms, body))


_names = hs.sampled_from(["m", "n", "d", "e", "a1", "b1", "r1", "", "Bad name", "x" * 129, "é"])
_models = hs.sampled_from(["m", "m", "m", "n", "Bad model"])
_labels = hs.sampled_from(["1", "2", "3", "4", "/"])
_deployments = hs.sampled_from(["d", "d", "e", "nowhere"])
_nodes = hs.sampled_from(["a1", "a2", "b1", "b2"])
_ints = hs.sampled_from([0, 1, 2, 1_000, -1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63)])
_texts = hs.sampled_from(["", "1", "2", "failed_to_load", "not a code", "x" * 2_000, "ü"])
_digests = hs.sampled_from([digest_of("a"), digest_of("b"), "", "short", "G" * 64, "a" * 63 + "\n"])
_expected = hs.sampled_from([None, None, None, "", "1", "2"])
_counters = hs.builds(StageCounters, _ints, _ints)
_wild_summaries = hs.builds(VersionSummary, _digests, _digests, _digests, _digests, _digests, _ints, _ints, _ints, _ints)
_publications = hs.one_of(
    hs.builds(publication, _models, _labels, hs.sampled_from(["", "", "other"])),
    hs.builds(c.Publish, _models, _labels, _wild_summaries, hs.sampled_from([b"", b"manifest"])),
)
_sides = hs.builds(Side, hs.sampled_from(["a", "b", "Bad zone"]), hs.lists(_nodes, max_size=3).map(tuple))
_wild_bodies = hs.one_of(
    _publications,
    hs.builds(c.PublishBatch, hs.lists(_publications, max_size=4).map(tuple)),
    hs.builds(c.DeleteVersion, _models, _labels),
    hs.builds(
        c.DeclareDeployment,
        _deployments,
        _models,
        _sides,
        hs.none() | _sides,
        hs.builds(Policy, _ints, _ints, _ints | hs.just(60_000), hs.sampled_from(DrainOverdue)),
    ),
    hs.builds(c.Activate, _deployments, _labels, _expected, _names),
    hs.builds(c.RollBack, _deployments, _expected, _names),
    hs.builds(
        c.Attest,
        _names,
        _nodes,
        hs.sampled_from(SideName),
        hs.sampled_from(Stage),
        _digests,
        _digests,
        _names,
        _counters,
        _texts,
        _texts,
    ),
    hs.builds(c.AdvanceRollout, _names, hs.sampled_from(Phase)),
    hs.builds(c.AbortRollout, _names, _texts, _names, _texts),
    hs.builds(c.RecordVerdict, _deployments, hs.sampled_from(["consistent", "diverged", "fine"]), hs.binary(max_size=8)),
    hs.builds(c.RaiseFeatureLevel, _ints),
    hs.builds(c.FailOver, _deployments, hs.sampled_from(SideName), hs.none() | hs.sampled_from(SideName), _ints, hs.booleans()),
    hs.builds(
        c.RecordCheck,
        _deployments,
        hs.sampled_from([*VERDICTS, "fine"]),
        _texts,
        hs.binary(max_size=8),
        hs.builds(Basis, _ints, _ints, _labels, _ints, _ints, _ints),
    ),
    hs.builds(
        evidence,
        _nodes,
        hs.sampled_from(["1", "2", "", "/"]),
        deployment=_deployments,
        generation=_ints,
        order_revision=_ints,
        checksum=_digests,
        vector_from=hs.sampled_from(VectorFrom),
        derived_digest=_digests,
        boot_id=_names,
        told_ms=_ints,
        verified_age_ms=_ints,
        finding=_texts,
    ),
)
_envelopes = hs.tuples(
    hs.sampled_from([c.SCHEMA] * 20 + [0, c.SCHEMA + 1]),
    hs.sampled_from(["", "k1", "k2", "k3", "with space", "ü", "x" * 129, f"{NOW_MS}-a", f"{NOW_MS - 48 * HOUR_MS}-b", f"{NOW_MS * 5}-c"]),
    hs.sampled_from(["publisher", "operator", "", "x" * 300]),
    hs.sampled_from([0, 1, 500, HOUR_MS, 25 * HOUR_MS, -5_000, -NOW_MS - 1]),
)
HELPFUL = (
    "push",
    "push",
    "push",
    "push",
    "push",
    "push",
    "activate",
    "roll back",
    "declare",
    "publish",
    "abort",
    "fail",
    "delete",
    "verdict",
    "evidence",
    "evidence",
    "fail over",
)
PRELUDE = (publication("m", "1"), publication("m", "2"), declaration())


@hs.composite
def payload_lists(draw: hs.DrawFn, limits: Limits | None = None, max_size: int = 40) -> list[bytes]:
    """Encoded commands for one log, from an empty state on; some bytes are no command at all."""
    writer = _Writer(draw, limits)
    for level in range(2, draw(hs.sampled_from([1, SUPPORTED_FEATURE_LEVEL])) + 1):
        writer.append(command_bytes(c.RaiseFeatureLevel(level), f"level-{level}"))
    if draw(hs.integers(0, 3)):
        for place, body in enumerate(PRELUDE):
            writer.append(command_bytes(body, f"prelude-{place}"))
    kinds = hs.sampled_from(["help"] * 9 + ["carry"] * 4 + ["wild"] * 4 + ["again", "garbage"])
    least = draw(hs.sampled_from([0, max_size // 2, max_size]))
    for kind in draw(hs.lists(kinds, min_size=least, max_size=max_size)):
        writer.step(kind)
    return writer.payloads


class _Writer:
    """Writes one log, and knows the state that its reader has."""

    def __init__(self, draw: hs.DrawFn, limits: Limits | None) -> None:
        self.draw = draw
        self.state = State.empty(limits)
        self.payloads: list[bytes] = []
        self.now_ms = NOW_MS

    def append(self, payload: bytes) -> None:
        self.payloads.append(payload)
        self.state = apply_batch(self.state, [payload]).state

    def step(self, kind: str) -> None:
        draw = self.draw
        if kind == "garbage":
            self.append(draw(hs.binary(max_size=12)))
        elif kind == "again" and self.payloads:
            self.append(draw(hs.sampled_from(self.payloads)))
        elif kind == "wild":
            schema, key, principal, jump_ms = draw(_envelopes)
            self.now_ms = max(self.now_ms, self.now_ms + jump_ms)
            key = key or f"wild-{len(self.payloads)}"
            self.append(c.encode(c.Command(schema, key, principal, "member-a", self.now_ms + min(jump_ms, 0), draw(_wild_bodies))))
        elif kind == "carry":
            self._carry()
        else:
            self.now_ms += draw(hs.sampled_from([0, 0, 1, 60_000, 13 * HOUR_MS]))
            self._append_body(_helpful(draw, self.state, len(self.payloads)))

    def _append_body(self, body: c.Body) -> None:
        self.append(command_bytes(body, f"{self.now_ms}-help-{len(self.payloads)}", self.now_ms))

    def _carry(self) -> None:
        """Bring a rollout on by one phase."""
        rollout = _running(self.state)
        for _ in range(8):
            now = _running(self.state)
            if rollout is None or now is None or now.phase is not rollout.phase:
                return
            self._append_body(_push(self.draw, self.state, now))


def _running(state: State) -> Rollout | None:
    found = [rollout for rollout in state.rollouts.values() if rollout.status is RolloutStatus.RUNNING]
    return min(found, key=lambda each: each.id) if found else None


def _helpful(draw: hs.DrawFn, state: State, place: int) -> c.Body:
    """A command that has a chance in this state."""
    rollout = _running(state)
    match draw(hs.sampled_from(HELPFUL)):
        case "push" if rollout is not None:
            return _push(draw, state, rollout)
        case "push" | "activate":
            return c.Activate("d", draw(_labels), None, f"r{place}")
        case "roll back":
            return c.RollBack("d", None, f"r{place}")
        case "declare":
            return declaration(draw(hs.sampled_from(["d", "d", "e"])), "m", draw(hs.sampled_from([("a1", "a2"), ("a1",)])))
        case "abort" if rollout is not None:
            return c.AbortRollout(rollout.id, "operator", "", "")
        case "fail" if rollout is not None:
            node, side = draw(hs.sampled_from(list(sides(state.deployments[rollout.deployment]).items())))
            return attestation(rollout, node, side, Stage.FAILED)
        case "delete":
            return c.DeleteVersion("m", draw(_labels))
        case "fail over":
            force = draw(hs.booleans())
            return c.FailOver("d", draw(hs.sampled_from(SideName)), None, draw(hs.sampled_from([0, 60_000, HOUR_MS])), force)
        case "evidence":
            order = draw(hs.integers(0, state.revision))
            boot = draw(hs.sampled_from(["boot-1", "boot-2"]))
            node = draw(hs.sampled_from(["a1", "a2", "b1"]))
            return evidence(node, draw(_labels), order_revision=order, boot_id=boot, told_ms=draw(hs.integers(0, 5_000)))
        case "verdict" if state.feature_level >= 2 and "d" in state.deployments:
            late = draw(hs.sampled_from([0, 0, 0, 1, 5]))
            return check(state, draw(hs.sampled_from(VERDICTS)), started_revision=max(0, state.revision - late))
        case "verdict":
            return c.RecordVerdict("d", "consistent", b"{}")
        case _:
            return publication("m", draw(_labels))


def _push(draw: hs.DrawFn, state: State, rollout: Rollout) -> c.Body:
    """What brings the rollout on: the controller's proposal, or what the next node attests."""
    due = decide(state, state.cluster_ms, draw(hs.sampled_from([(), (), (), (), ("a1",)])))
    if due:
        return due[0]
    deployment = state.deployments[rollout.deployment]
    node = waiting_for(rollout, deployment)[0]
    gate = ROWS[rollout.phase].gate
    assert gate is not None
    return attestation(rollout, node, sides(deployment)[node], gate)
