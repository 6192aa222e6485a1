"""Evidence: which bytes a node says that it serves with, one record for each node of a deployment.

A node speaks for the deployments that name it and of orders that were given. What it said later in the same boot stands: an earlier word
that was held up on its way changes nothing. Between boots the order tells, which a node obeys durably and never goes back from: a word of
another boot and of a lower order is an earlier one. Of the same order nothing in the log tells which boot came first; a node therefore says
it again soon after it started. A node that leaves a deployment takes its record along; one that changes sides keeps it: what it said is of
its memory.
"""

from __future__ import annotations

import msgspec

from raftmeta.core.commands import RecordEvidence
from raftmeta.core.handlers.checks import SHOWN, Refusal, code_fault, int_fault, is_digest, label_fault, name_fault
from raftmeta.core.rollout import side_called, side_of_node, sides
from raftmeta.core.state import evidence_key
from raftmeta.core.types import Deployment, Evidence
from raftmeta.core.work import Work

DIGESTS = ("checksum", "vector_root")
MAYBE_DIGESTS = ("derived_digest", "config_digest", "tokenizer_digest")


def record_evidence(work: Work, body: RecordEvidence) -> bytes | Refusal:
    fault = _field_fault(body)
    if fault is not None:
        return fault
    deployment = work.deployments.get(body.deployment)
    if deployment is None:
        return Refusal("unknown_deployment", f"no deployment {body.deployment[:128]!a}")
    side = side_of_node(deployment, body.node)
    if side is None:
        return Refusal("unknown_node", f"node {body.node[:128]!a} belongs to neither side of deployment {body.deployment!a}")
    if (body.generation, body.order_revision) > (work.base.generation, work.revision):
        found = f"order {(body.generation, body.order_revision)} of node {body.node!a}"
        return Refusal("bad_field", f"{found} is later than {(work.base.generation, work.revision)}")
    key = evidence_key(body.deployment, body.node)
    before = work.evidence.get(key)
    if before is not None and before.boot_id == body.boot_id and before.told_ms >= body.told_ms:
        detail = f"node {body.node!a} said something later in this boot, at {before.told_ms} ms of its clock; this is of {body.told_ms}"
        return Refusal("stale_evidence", detail)
    order = (body.generation, body.order_revision)
    if before is not None and before.boot_id != body.boot_id and order < (before.generation, before.order_revision):
        said = f"node {body.node!a} said in another boot that it obeyed order {(before.generation, before.order_revision)}"
        return Refusal("stale_evidence", f"{said}; this is of {order}, which is earlier")
    evidence = Evidence(
        **msgspec.structs.asdict(body),
        side=side,
        zone=side_called(deployment, side).zone,
        revision=work.revision,
        recorded_ms=work.cluster_ms,
    )
    work.evidence.put(key, evidence)
    return b""


def follow_nodes(work: Work, before: Deployment, after: Deployment) -> None:
    """The records have the places that their nodes have now."""
    places = sides(after)
    for node in sides(before):
        key = evidence_key(before.name, node)
        evidence = work.evidence.get(key)
        if evidence is None:
            continue
        side = places.get(node)
        if side is None:
            work.evidence.delete(key)
        elif (side, zone := side_called(after, side).zone) != (evidence.side, evidence.zone):
            work.evidence.put(key, msgspec.structs.replace(evidence, side=side, zone=zone))


def _field_fault(body: RecordEvidence) -> Refusal | None:
    fault = name_fault("boot id", body.boot_id)
    for field in ("generation", "order_revision", "told_ms", "verified_age_ms"):
        fault = fault or int_fault(field, getattr(body, field))
    if body.finding:
        fault = fault or code_fault("finding", body.finding)
    return fault or _bytes_fault(body)


def _bytes_fault(body: RecordEvidence) -> Refusal | None:
    """All of them with a version, none without one."""
    fault = label_fault(body.version) if body.version else None
    if fault is not None:
        return fault
    for field in (*DIGESTS, *MAYBE_DIGESTS):
        value: str = getattr(body, field)
        if not body.version and value:
            return Refusal("bad_field", f"{field} {value[:SHOWN]!a} belongs to a version, and none is named")
        if body.version and not is_digest(value) and (value or field in DIGESTS):
            return Refusal("bad_field", f"{field} {value[:SHOWN]!a} is not 64 lower-case hex characters")
    return None
