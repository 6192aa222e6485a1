"""Versions: publishing, looking, deleting.

A manifest is judged against itself, packed and summed up here, before anything is proposed; the log carries the packed bytes, which no
member decodes when it applies them.
"""

from __future__ import annotations

from typing import cast

from api import replies
from api.json_body import Body
from api.operation import Answer, Call, Kind, Operation, Reply
from api.schemas import answers, examples, records
from api.schemas.bodies import BatchBody, PublishBody
from api.service import Service, result_of
from raftmeta.core import manifest as manifests
from raftmeta.core import queries
from raftmeta.core.commands import DeleteVersion, Publish, PublishBatch
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import Manifest
from raftmeta.core.state import State, version_key
from raftmeta.core.types import VersionRecord
from raftmeta.log.messages import MAX_COMMAND_BYTES

MAX_BATCH_BODY = 8 << 20
UNPACKED_RATIO = 8  # of a manifest as JSON to its packed bytes, about


async def publish(service: Service, call: Call) -> Reply:
    model, label = call.params["model"], call.params["label"]
    command = await service.compute(call.size_bytes, publication, model, label, call.body.manifest)
    outcome = await service.propose(call, command)
    result = result_of(outcome)
    created = bool(result.get("created"))
    record = _published(service.state_with(outcome.revision), model, label, result.get("number"))
    return replies.done(outcome.revision, records.version(record), status=201 if created else 200, repeated=outcome.repeated)


async def publish_batch(service: Service, call: Call) -> Reply:
    model = call.params["model"]
    authorizer = service.member.authorizer
    for item in call.body.items:
        authorizer.require(call.caller, "publish", f"models/{model}/versions/{item.label}")
    command = await service.compute(call.size_bytes, _publications, model, call.body)
    outcome = await service.propose(call, command)
    state = service.state_with(outcome.revision)
    numbers = cast(list[int], result_of(outcome)["numbers"])
    items = zip(call.body.items, numbers, strict=True)
    found = [records.version(_published(state, model, item.label, number)) for item, number in items]
    return replies.done(outcome.revision, {"versions": found}, repeated=outcome.repeated)


async def delete_version(service: Service, call: Call) -> Reply:
    outcome = await service.propose(call, DeleteVersion(call.params["model"], call.params["label"]))
    return replies.done(outcome.revision, {"revision": outcome.revision}, repeated=outcome.repeated)


async def get_version(service: Service, call: Call) -> Reply:
    state = await service.view(call)
    return replies.at(state, records.version(queries.find_version(state, call.params["model"], call.params["label"])))


async def get_manifest(service: Service, call: Call) -> Reply:
    state = await service.view(call)
    packed = queries.find_manifest(state, call.params["model"], call.params["label"])
    body = await service.compute(UNPACKED_RATIO * len(packed), _unpacked, packed)
    return Reply(status=200, body=body, revision=state.revision, generation=state.generation)


async def list_versions(service: Service, call: Call) -> Reply:
    state = await service.view(call)
    return replies.page(state, queries.versions_page(state, call.params["model"], call.query.limit, call.query.after))


def publication(model: str, label: str, manifest: Manifest) -> Publish:
    """Raises RaftmetaError bad_manifest or manifest_too_large."""
    faults = manifests.faults(manifest)
    if faults:
        raise RaftmetaError("bad_manifest", f"{label}: {'; '.join(faults)}")
    packed = manifests.pack(manifest)
    return Publish(model, label, manifests.summarize(manifest, packed), packed)


def _publications(model: str, body: BatchBody) -> PublishBatch:
    labels = [item.label for item in body.items]
    if len(set(labels)) != len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise RaftmetaError("bad_field", f"the label {twice!r} stands twice in the batch")
    items = tuple(publication(model, item.label, item.manifest) for item in body.items)
    size = sum(len(item.manifest) + 1_024 for item in items)
    if size > MAX_COMMAND_BYTES:
        raise RaftmetaError("manifest_too_large", f"the batch packs to {size} bytes, the limit is {MAX_COMMAND_BYTES}; send it in parts")
    return PublishBatch(items)


def _unpacked(packed: bytes) -> bytes:
    return replies.encode(manifests.unpack(packed))


def _published(state: State, model: str, label: str, number: object) -> VersionRecord:
    """The version that the command published, which a repeated command may find deleted, and its label taken by other bytes."""
    record = state.versions.get(version_key(model, label))
    if record is None or record.number != number:
        raise RaftmetaError("unknown_version", f"version {label!r} of model {model!r}, number {number}, was published and deleted since")
    return record


OPERATIONS = (
    Operation(
        id="publish_batch",
        method="POST",
        path="/v1/models/{model}/versions:batch",
        kind=Kind.MUTATION,
        action="publish",
        what="Publish up to 1,000 versions, all or none",
        handler=publish_batch,
        answers=(Answer(200, answers.Versions, {"versions": [examples.VERSION]}, "All are published, in order of the items"),),
        errors=("bad_manifest", "manifest_too_large", "version_exists", "unknown_version"),
        body=Body(BatchBody),
        example={"items": [{"label": "1.4.0", "manifest": examples.MANIFEST}]},
        max_body_bytes=MAX_BATCH_BODY,
    ),
    Operation(
        id="list_versions",
        method="GET",
        path="/v1/models/{model}/versions",
        kind=Kind.LIST,
        action="read",
        what="List the versions of a model by number",
        handler=list_versions,
        answers=(Answer(200, answers.VersionPage, {"items": [examples.VERSION], "next": None}, "One page"),),
        errors=("unknown_model",),
    ),
    Operation(
        id="publish",
        method="PUT",
        path="/v1/models/{model}/versions/{label}",
        kind=Kind.MUTATION,
        action="publish",
        what="Publish a version; the same bytes under the same label change nothing",
        handler=publish,
        answers=(
            Answer(200, records.Version, examples.VERSION, "The label held these bytes already"),
            Answer(201, records.Version, examples.VERSION, "The version is new"),
        ),
        errors=("bad_manifest", "manifest_too_large", "version_exists", "unknown_version"),
        body=Body(PublishBody),
        example={"manifest": examples.MANIFEST},
        hot=True,
    ),
    Operation(
        id="get_version",
        method="GET",
        path="/v1/models/{model}/versions/{label}",
        kind=Kind.READ,
        action="read",
        what="Look at one version",
        handler=get_version,
        answers=(Answer(200, records.Version, examples.VERSION, "The version"),),
        errors=("unknown_model", "unknown_version"),
        hot=True,
    ),
    Operation(
        id="delete_version",
        method="DELETE",
        path="/v1/models/{model}/versions/{label}",
        kind=Kind.MUTATION,
        action="delete",
        what="Delete a version that nothing names",
        handler=delete_version,
        answers=(Answer(200, answers.Acknowledged, {"revision": 44}, "It is gone; its number is not used again"),),
        errors=("unknown_model", "unknown_version", "in_use"),
    ),
    Operation(
        id="get_manifest",
        method="GET",
        path="/v1/models/{model}/versions/{label}/manifest",
        kind=Kind.READ,
        action="read",
        what="The files and tensors of a version",
        handler=get_manifest,
        answers=(Answer(200, Manifest, examples.MANIFEST, "The manifest"),),
        errors=("unknown_model", "unknown_version"),
    ),
)
