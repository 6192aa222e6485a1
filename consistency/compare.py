"""The rules of a check: from what was decided and what the nodes answered to a verdict. Pure.

Each rule is one generator of findings (a difference) and reasons (something that could not be looked at). Any finding makes `diverged`;
else any reason makes `incomplete`; `consistent` needs the nodes of both sides to have answered and every rule to be satisfied. All nodes,
unless the caller stated a smaller quorum: then those that are missing stand in the verdict as unseen, and it says nothing of them. While a
switch is in progress the sides may differ, so contents are not compared and the verdict is `incomplete` with the reason `switching`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from consistency import weights
from consistency.findings import CONSISTENT, DIVERGED, INCOMPLETE, Finding, Limits, Reason, Target, Verdict
from consistency.scene import Scene
from raftmeta.core.errors import RaftmetaError

MAX_FINDINGS = 200  # kept in a verdict; the total is counted
MAX_ROOTS_SHOWN = 3  # of one side

# Why a node could not be asked at all: what a quorum may excuse. Everything else was said by a node that answers, or seen of its memory.
EXCUSED = frozenset({"unreachable", "timed_out", "unknown_node", "starting", "shutting_down", "overloaded"})

Rule = Callable[[Scene], Iterator[Finding | Reason] | Iterator[Finding]]


def compare(scene: Scene) -> Verdict:
    target = scene.target
    reasons, unseen = _unanswered(scene)
    findings: list[Finding] = []
    blocked = list(_not_comparable(scene))
    if blocked:
        reasons = blocked + reasons
    else:
        for rule in RULES:
            for item in rule(scene):
                findings.append(item) if isinstance(item, Finding) else reasons.append(item)
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
        models_primary=scene.models("primary"),
        models_standby=scene.models("standby"),
        lag_ms_primary=scene.mean_lag("primary"),
        lag_ms_standby=scene.mean_lag("standby"),
        mismatch_ratio=scene.ratio(bool(blocked)),
        tensors_total=target.tensor_count,
        tensors_different=0 if blocked else scene.tensors_different(),
        limits=scene.limits,
        nodes=tuple(scene.summary(answer) for answer in scene.answers),
        reasons=tuple(reasons),
        findings=tuple(findings[:MAX_FINDINGS]),
        findings_total=len(findings) + (0 if blocked else weights.uncounted(scene)),
        order_revision=target.order_revision,
        started_revision=target.started_revision,
        nodes_total=len(target.places),
        nodes_seen=sum(answer.vector is not None for answer in scene.answers),
        unseen=tuple(unseen),
        oldest_proof_ms=scene.oldest_proof_ms(),
        moved=target.moved,
        oldest_answer_ms=scene.oldest_answer_ms(),
    )


def gave_up(target: Target, error: RaftmetaError, limits: Limits) -> Verdict:
    """The verdict of a deployment that members could not tell enough about."""
    made = compare(Scene(msgspec.structs.replace(target, places=(), switching=""), (), limits=limits))
    reason = Reason(error.code, "", error.detail)
    return msgspec.structs.replace(made, verdict=INCOMPLETE, reasons=(reason,), findings=(), findings_total=0)


# The rules.


def _not_comparable(scene: Scene) -> Iterator[Reason]:
    if not scene.target.version:
        yield Reason("nothing_active", "", "no version was activated yet, so there is nothing to compare")
    if scene.target.switching:
        yield Reason("switching", "", scene.target.switching)
    for answer in scene.answers:
        if answer.vector is not None and answer.vector.switching:
            yield Reason("switching", answer.place.node, "the node is switching; check again when it is done")


def _unanswered(scene: Scene) -> tuple[list[Reason], list[Reason]]:
    """Gaps, whoever forgot to ask: those that count, and those that the quorum of their side allows."""
    counting: list[Reason] = []
    allowed: list[Reason] = []
    if not scene.target.places:
        counting.append(Reason("no_nodes", "", "the deployment has no nodes"))
    answers = {answer.place.node: answer for answer in scene.answers}
    sides = [place.side for place in scene.target.places]
    enough = {side: scene.seen(side) >= scene.limits.needed(sides.count(side)) for side in set(sides)}
    for place in scene.target.places:
        answer = answers.get(place.node)
        if answer is None:
            reason = Reason("no_answer", place.node, "the node was not asked")
        elif answer.vector is None or answer.code:
            reason = Reason(answer.code or "no_answer", place.node, answer.detail)
        else:
            continue
        is_excused = answer is not None and answer.vector is None and answer.code in EXCUSED
        (allowed if is_excused and enough[place.side] else counting).append(reason)
    return counting, allowed


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
    for answer in scene.on_version():
        assert answer.vector is not None
        if answer.vector.config_digest != scene.target.config_digest:
            detail = "configuration or tokenizer files differ from the manifest's"
            yield scene.finding("config", answer.vector.node, scene.target.config_digest, answer.vector.config_digest, detail=detail)


def _sides(scene: Scene) -> Iterator[Finding]:
    """Side to side: do both hold the same, and which of them holds what was published?"""
    roots = {"primary": set[str](), "standby": set[str]()}
    for answer in scene.on_version():
        assert answer.vector is not None
        roots[answer.place.side].add(answer.vector.vector_root)
    primary, standby, published = roots["primary"], roots["standby"], {scene.target.vector_root}
    if not primary or not standby:
        return
    if primary == standby:
        if len(primary) == 1 and primary != published:
            detail = "both sides hold the same weights, and these are not what was published"
            yield scene.finding("sides", "", scene.target.vector_root, *primary, detail=detail)
        return
    right = [side for side, found in roots.items() if found == published]
    wrong = "standby" if right == ["primary"] else "primary"
    detail = f"the {right[0]} holds what was published, the {wrong} does not" if right else "neither side holds what was published"
    found = f"primary {_shown(primary)}; standby {_shown(standby)}"
    yield scene.finding("sides", "", "the same weights on both sides", found, detail=detail)


def _model_counts(scene: Scene) -> Iterator[Finding]:
    for answer in scene.answers:
        given, place = answer.vector, answer.place
        if given is not None and not place.models_least <= given.active_models <= place.models_most:
            detail = "the node has another number of active models than the cluster decided for it"
            yield scene.finding("active_models", given.node, place.models_least, given.active_models, detail=detail)


def _lags(scene: Scene) -> Iterator[Finding | Reason]:
    sides = sorted({answer.place.side for answer in scene.answers})
    means = {side: scene.mean_lag(side) for side in sides}
    for side, mean in means.items():
        if mean is None and scene.seen(side):
            yield Reason("lag_unknown", "", f"no node of the {side} side knows how long its last switch took")
    primary, standby = means.get("primary"), means.get("standby")
    if primary is not None and standby is not None and abs(primary - standby) > scene.limits.lag_ms:
        expected = f"sides at most {scene.limits.lag_ms:g} ms apart"
        yield scene.finding("lag", "", expected, f"primary {primary:.1f} ms, standby {standby:.1f} ms")


RULES: tuple[Rule, ...] = (_versions, _configs, _sides, weights.weights, weights.sha256, _model_counts, _lags)


def _shown(roots: set[str]) -> str:
    more = f" and {len(roots) - MAX_ROOTS_SHOWN} others" if len(roots) > MAX_ROOTS_SHOWN else ""
    return ", ".join(sorted(roots)[:MAX_ROOTS_SHOWN]) + more
