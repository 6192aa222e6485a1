"""The rules of a check: from what was decided and what the nodes answered to a verdict. Pure.

Each rule is one generator of findings (a difference) and reasons (something that could not be looked at). Any finding makes `diverged`;
else any reason makes `incomplete`; `consistent` needs every node of both sides to have answered and every rule to be satisfied. While a
switch is in progress the sides may differ, so contents are not compared and the verdict is `incomplete` with the reason `switching`. A node
is not believed where the manifest can tell: entries must add up to the root, block checks to the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec
import numpy as np

from consistency import vector
from consistency.findings import (
    CONSISTENT,
    DIVERGED,
    INCOMPLETE,
    Answer,
    Finding,
    Limits,
    NodeSummary,
    Reason,
    Target,
    TensorSpec,
    Verdict,
)
from consistency.vector import Words
from raftmeta.core.errors import RaftmetaError

MAX_FINDINGS = 200  # kept in a verdict; the total is counted
MAX_BLOCKS_NAMED = 8  # of one tensor on one node
MAX_TENSORS_LOCATED = 16  # of one node: for these the block checks are fetched
MAX_LOCATIONS = 512  # of one check

Blocks = Mapping[tuple[str, str], Words]  # (node, tensor) -> block checks as the node gave them


@dataclass(frozen=True)
class Scene:
    """Everything the rules look at."""

    target: Target
    answers: Sequence[Answer]
    blocks: Blocks = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)

    def finding(
        self, code: str, node: str, expected: object, found: object, *, tensor: str = "", block: int = -1, detail: str = ""
    ) -> Finding:
        target = self.target
        return Finding(code, target.model, target.deployment, node, str(expected), str(found), tensor, block, detail)


def compare(scene: Scene) -> Verdict:
    target = scene.target
    reasons = list(_unanswered(scene))
    findings: list[Finding] = []
    blocked = list(_not_comparable(scene))
    if blocked:
        reasons = blocked + reasons
    else:
        for rule in RULES:
            for item in rule(scene):
                findings.append(item) if isinstance(item, Finding) else reasons.append(item)
    different = set() if blocked else _different_tensors(scene)
    verdict = DIVERGED if findings else INCOMPLETE if reasons else CONSISTENT
    return Verdict(
        verdict=verdict,
        deployment=target.deployment,
        model=target.model,
        version=target.version,
        number=target.number,
        checksum=target.checksum,
        vector_root=target.vector_root,
        revision=target.revision,
        generation=target.generation,
        models_primary=_models(scene, "primary"),
        models_standby=_models(scene, "standby"),
        lag_ms_primary=_mean_lag(scene, "primary"),
        lag_ms_standby=_mean_lag(scene, "standby"),
        mismatch_ratio=_ratio(scene, different, bool(blocked)),
        tensors_total=target.tensor_count,
        tensors_different=len(different),
        limits=scene.limits,
        nodes=tuple(_summary(scene, answer) for answer in scene.answers),
        reasons=tuple(reasons),
        findings=tuple(findings[:MAX_FINDINGS]),
        findings_total=len(findings),
    )


def gave_up(target: Target, error: RaftmetaError) -> Verdict:
    """The verdict of a deployment that members could not tell enough about."""
    made = compare(Scene(msgspec.structs.replace(target, places=(), switching=""), ()))
    return msgspec.structs.replace(made, verdict=INCOMPLETE, reasons=(Reason(error.code, "", error.detail),), findings=(), findings_total=0)


# What a collector has to ask next. It asks for roots first, then for this.


def needing_entries(target: Target, answers: Sequence[Answer]) -> list[str]:
    """Nodes whose root is not the manifest's."""
    if target.switching or not target.version:
        return []
    return [
        answer.vector.node
        for answer in answers
        if answer.vector is not None and not answer.vector.switching and answer.vector.vector_root != target.vector_root
    ]


def needing_blocks(target: Target, answers: Sequence[Answer]) -> list[tuple[str, str]]:
    """(node, tensor) for which block checks locate the damage: the nodes that differ, and one that holds what the manifest says."""
    wanted: dict[tuple[str, str], None] = {}
    healthy = [a.vector.node for a in answers if a.vector is not None and a.vector.vector_root == target.vector_root]
    for answer in answers:
        if answer.vector is None or answer.vector.checksum != target.checksum:
            continue
        for name in islice(_changed(target, answer), MAX_TENSORS_LOCATED):
            wanted[(answer.vector.node, name)] = None
            holder = healthy[0] if healthy else _holder(target, answers, name)
            if holder:
                wanted[(holder, name)] = None
    return list(wanted)[:MAX_LOCATIONS]


# The rules.


def _not_comparable(scene: Scene) -> Iterator[Reason]:
    if not scene.target.version:
        yield Reason("nothing_active", "", "no version was activated yet, so there is nothing to compare")
    if scene.target.switching:
        yield Reason("switching", "", scene.target.switching)
    for answer in scene.answers:
        if answer.vector is not None and answer.vector.switching:
            yield Reason("switching", answer.place.node, "the node is switching; check again when it is done")


def _unanswered(scene: Scene) -> Iterator[Reason]:
    """A side without nodes and a node without an answer are gaps, whoever forgot to ask."""
    answers = {answer.place.node: answer for answer in scene.answers}
    if not scene.target.places:
        yield Reason("no_nodes", "", "the deployment has no nodes")
    for place in scene.target.places:
        answer = answers.get(place.node)
        if answer is None:
            yield Reason("no_answer", place.node, "the node was not asked")
        elif answer.vector is None or answer.code:
            yield Reason(answer.code or "no_answer", place.node, answer.detail)


def _versions(scene: Scene) -> Iterator[Finding]:
    target = scene.target
    for answer in scene.answers:
        given = answer.vector
        if given is None:
            continue
        if given.model != target.model or given.version != target.version or given.checksum != target.checksum:
            expected = f"{target.model}/{target.version} {target.checksum}"
            found = f"{given.model}/{given.version} {given.checksum}"
            yield scene.finding("version", given.node, expected, found, detail="the node serves another version than was decided")


def _configs(scene: Scene) -> Iterator[Finding]:
    """Configuration, tokenizer and every other file that is no weights: one digest."""
    for answer in _on_version(scene):
        assert answer.vector is not None
        if answer.vector.config_digest != scene.target.config_digest:
            detail = "configuration or tokenizer files differ from the manifest's"
            yield scene.finding("config", answer.vector.node, scene.target.config_digest, answer.vector.config_digest, detail=detail)


def _weights(scene: Scene) -> Iterator[Finding]:
    for answer in _on_version(scene):
        given = answer.vector
        assert given is not None
        if given.entries is not None and vector.root(given.entries) != given.vector_root:
            found = vector.root(given.entries)
            detail = "the node's entries do not add up to its root: its memory changed in between, or it does not compute"
            yield scene.finding("self_contradiction", given.node, given.vector_root, found, detail=detail)
        if given.vector_root == scene.target.vector_root:
            continue
        if given.entries is None or not scene.target.tensors:
            yield scene.finding("vector_root", given.node, scene.target.vector_root, given.vector_root, detail="the tensors were not told")
            continue
        yield from _tensors(scene, answer)


def _tensors(scene: Scene, answer: Answer) -> Iterator[Finding]:
    given, specs = answer.vector, scene.target.tensors
    assert given is not None and given.entries is not None
    for name in sorted(specs.keys() - given.entries.keys()):
        yield scene.finding("tensor_missing", given.node, specs[name].entry, "nothing", tensor=name)
    for name in sorted(given.entries.keys() - specs.keys()):
        yield scene.finding("tensor_extra", given.node, "nothing", given.entries[name], tensor=name)
    for name in _changed(scene.target, answer):
        located = list(_located(scene, answer, name))
        yield from located or [scene.finding("tensor", given.node, specs[name].entry, given.entries[name], tensor=name)]


def _located(scene: Scene, answer: Answer, name: str) -> Iterator[Finding]:
    """The blocks that differ from those of a node whose blocks hash to the manifest's entry; nothing when either cannot be trusted."""
    given, spec = answer.vector, scene.target.tensors[name]
    assert given is not None and given.entries is not None
    mine = scene.blocks.get((given.node, name))
    candidates = (checks for (_, tensor), checks in scene.blocks.items() if tensor == name)
    good = next((checks for checks in candidates if _hash_to(spec, checks) == spec.entry), None)
    if mine is None or good is None or _hash_to(spec, mine) != given.entries[name]:
        return
    differing = np.flatnonzero((mine != good).any(axis=1)).tolist()
    for block in differing[:MAX_BLOCKS_NAMED]:
        begin = block * vector.BLOCK_BYTES
        end = min(spec.size_bytes, begin + vector.BLOCK_BYTES)
        detail = f"bytes {begin}..{end} of the tensor; {len(differing)} of its {len(good)} blocks differ"
        yield scene.finding("block", given.node, _pair(good[block]), _pair(mine[block]), tensor=name, block=block, detail=detail)


def _model_counts(scene: Scene) -> Iterator[Finding]:
    for answer in scene.answers:
        given, place = answer.vector, answer.place
        if given is not None and not place.models_least <= given.active_models <= place.models_most:
            detail = "the node has another number of active models than the cluster decided for it"
            yield scene.finding("active_models", given.node, place.models_least, given.active_models, detail=detail)


def _lags(scene: Scene) -> Iterator[Finding | Reason]:
    sides = sorted({answer.place.side for answer in scene.answers})
    means = {side: _mean_lag(scene, side) for side in sides}
    for side, mean in means.items():
        if mean is None and any(answer.vector is not None for answer in scene.answers if answer.place.side == side):
            yield Reason("lag_unknown", "", f"no node of the {side} side knows how long its last switch took")
    primary, standby = means.get("primary"), means.get("standby")
    if primary is not None and standby is not None and abs(primary - standby) > scene.limits.lag_ms:
        expected = f"sides at most {scene.limits.lag_ms:g} ms apart"
        yield scene.finding("lag", "", expected, f"primary {primary:.1f} ms, standby {standby:.1f} ms")


RULES: tuple[Callable[[Scene], Iterator[Finding | Reason] | Iterator[Finding]], ...] = (_versions, _configs, _weights, _model_counts, _lags)


# Figures.


def _on_version(scene: Scene) -> Iterator[Answer]:
    """Answers about the version that was decided; others have a finding of their own, and differ throughout."""
    for answer in scene.answers:
        if answer.vector is not None and answer.vector.checksum == scene.target.checksum:
            yield answer


def _changed(target: Target, answer: Answer) -> Iterator[str]:
    """Names of tensors that the node and the manifest both have, with different entries, sorted."""
    entries = answer.vector.entries if answer.vector is not None else None
    if entries is not None:
        yield from (name for name in sorted(target.tensors.keys() & entries.keys()) if entries[name] != target.tensors[name].entry)


def _node_different(target: Target, answer: Answer) -> set[str]:
    entries = answer.vector.entries if answer.vector is not None else None
    if entries is None:
        return set()
    return set(_changed(target, answer)) | (target.tensors.keys() ^ entries.keys())


def _different_tensors(scene: Scene) -> set[str]:
    return set().union(*(_node_different(scene.target, answer) for answer in scene.answers))


def _ratio(scene: Scene, different: set[str], blocked: bool) -> float | None:
    """None when nobody's tensors are known, or some root differs and its tensors were not told."""
    answers = [answer.vector for answer in scene.answers if answer.vector is not None]
    unknown = any(given.entries is None and given.vector_root != scene.target.vector_root for given in answers)
    if blocked or unknown or not answers or not scene.target.tensor_count:
        return None
    return len(different) / scene.target.tensor_count


def _models(scene: Scene, side: str) -> int | None:
    counts = [answer.vector.active_models for answer in scene.answers if answer.place.side == side and answer.vector is not None]
    return min(counts, default=None)


def _lag(answer: Answer) -> float | None:
    """The node's own figure; after a restart it has none, and what it attested counts."""
    if answer.vector is not None and answer.vector.lag_ms >= 0:
        return answer.vector.lag_ms
    return float(answer.place.attested_lag_ms) if answer.vector is not None and answer.place.attested_lag_ms >= 0 else None


def _mean_lag(scene: Scene, side: str) -> float | None:
    known = [lag for answer in scene.answers if answer.place.side == side and (lag := _lag(answer)) is not None]
    return sum(known) / len(known) if known else None


def _holder(target: Target, answers: Sequence[Answer], name: str) -> str:
    """A node that holds this tensor as the manifest says, "" if none does."""
    for answer in answers:
        entries = answer.vector.entries if answer.vector is not None else None
        if answer.vector is not None and entries is not None and entries.get(name) == target.tensors[name].entry:
            return answer.vector.node
    return ""


def _hash_to(spec: TensorSpec, checks: Words) -> str:
    """The entry that these block checks make, "" when they are too many or too few."""
    try:
        return vector.entry_of(spec.dtype, spec.shape, spec.size_bytes, checks)
    except RaftmetaError:
        return ""


def _pair(check: Words) -> str:
    a, b = check.tolist()
    return f"{a:016x}:{b:016x}"


def _summary(scene: Scene, answer: Answer) -> NodeSummary:
    place, given, lag = answer.place, answer.vector, _lag(answer)
    if given is None:
        return NodeSummary(place.node, place.side, place.zone, False, code=answer.code, detail=answer.detail)
    return NodeSummary(
        place.node,
        place.side,
        place.zone,
        True,
        version=given.version,
        slot=given.slot,
        epoch=given.epoch,
        boot_id=given.boot_id,
        vector_root=given.vector_root,
        equal_to_manifest=given.vector_root == scene.target.vector_root if scene.target.vector_root else None,
        tensors_different=len(_node_different(scene.target, answer)),
        active_models=given.active_models,
        lag_ms=-1.0 if lag is None else lag,
        code=answer.code,
        detail=answer.detail,
    )
