"""Publishing and deleting versions.

A label holds one set of bytes for ever: the same checksum again is a success that changes nothing, another is refused. Numbers rise
strictly per model and are not reused, so a model outlives its versions. Publishing never makes a version serve.
"""

from __future__ import annotations

from hashlib import sha256

from raftmeta.core.commands import DeleteVersion, Publish, PublishBatch
from raftmeta.core.handlers.checks import Refusal, label_fault, name_fault, result, summary_fault
from raftmeta.core.handlers.deployments import running_rollout
from raftmeta.core.manifest import MAX_PACKED_BYTES
from raftmeta.core.state import version_key
from raftmeta.core.types import ModelRecord, VersionRecord
from raftmeta.core.work import Work

MAX_ITEMS = 1_000  # publications of one batch


def publish(work: Work, body: Publish) -> bytes | Refusal:
    done = _publish(work, body)
    return done if isinstance(done, Refusal) else result(created=int(done[1]), number=done[0])


def publish_batch(work: Work, body: PublishBatch) -> bytes | Refusal:
    """One revision per item; the first item has the revision that the command was given."""
    items = body.items
    if not 1 <= len(items) <= MAX_ITEMS:
        return Refusal("bad_field", f"a batch has {len(items)} items, expected 1..{MAX_ITEMS}")
    numbers: list[int] = []
    created: list[int] = []
    for place, item in enumerate(items):
        work.ledger.revision += place > 0
        done = _publish(work, item)
        if isinstance(done, Refusal):
            return Refusal(done.code, f"item {place}: {done.detail}", result(item=place))
        numbers.append(done[0])
        created.append(int(done[1]))
    return result(created=created, numbers=numbers)


def delete_version(work: Work, body: DeleteVersion) -> bytes | Refusal:
    catalog = work.catalog
    model = catalog.model(body.model)
    if model is None:
        return Refusal("unknown_model", f"no model {body.model[:128]!a}")
    key = version_key(body.model, body.label)
    version = catalog.version(key)
    if version is None:
        return Refusal("unknown_version", f"model {body.model!a} has no version {body.label[:128]!a}")
    user = _user_of(work, version)
    if user:
        return Refusal("in_use", f"version {body.label!a} of model {body.model!a} is {user}")
    count = model.version_count - 1
    catalog.delete(key, ModelRecord(model.name, model.last_number, count, model.created_revision, model.created_ms))
    return result(number=version.number)


def _publish(work: Work, body: Publish) -> tuple[int, bool] | Refusal:
    """Number of the version, and whether it is new."""
    name, label, summary, manifest, catalog = body.model, body.label, body.summary, body.manifest, work.catalog
    key = f"{name}/{label}"
    present = catalog.version(key)
    if present is not None:
        if present.summary.checksum == summary.checksum:
            return present.number, False
        return Refusal(
            "version_exists",
            f"version {label!a} of model {name!a} has checksum {present.summary.checksum}, these bytes have {summary.checksum}",
        )
    model = catalog.model(name)
    fault = (name_fault("model", name) if model is None else None) or label_fault(label) or summary_fault(summary)
    if fault is not None:
        return fault
    if not 0 < len(manifest) <= MAX_PACKED_BYTES:
        return Refusal(
            "manifest_too_large" if manifest else "bad_manifest", f"the packed manifest has {len(manifest)} bytes, limit {MAX_PACKED_BYTES}"
        )
    digest = sha256(manifest).digest()
    if digest.hex() != summary.manifest_digest:
        return Refusal(
            "bad_manifest", f"manifest_digest {summary.manifest_digest} is not the SHA-256 {digest.hex()} of the packed manifest"
        )
    revision, now = work.ledger.revision, work.cluster_ms
    if model is None:
        if catalog.model_count >= work.limits.max_models:
            return Refusal("quota_exceeded", f"there are {work.limits.max_models} models, the limit")
        model = ModelRecord(name, 1, 1, revision, now)
    else:
        if model.version_count >= work.limits.max_versions_per_model:
            return Refusal("quota_exceeded", f"model {name!a} has {model.version_count} versions, the limit")
        model = ModelRecord(name, model.last_number + 1, model.version_count + 1, model.created_revision, model.created_ms)
    number = model.last_number
    version = VersionRecord(name, label, number, summary, work.principal, revision, now)
    catalog.publish(key, version, manifest, digest, model)
    return number, True


def _user_of(work: Work, version: VersionRecord) -> str:
    """Who needs the version, "" if nobody does."""
    for name in work.usage.candidates(version.model, version.label):
        deployment = work.deployments.get(name)
        if deployment is None or deployment.model != version.model:
            continue
        if deployment.version == version.label:
            return f"what deployment {deployment.name!a} serves"
        if deployment.previous == version.label:
            return f"what deployment {deployment.name!a} rolls back to"
        rollout = running_rollout(work, deployment)
        if rollout is not None and rollout.to_version == version.label:
            return f"the target of rollout {rollout.id!a}"
    return ""
