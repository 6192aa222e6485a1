"""The records of the state as JSON objects.

Inside, a record is an array in field order (that is the log's format); outside it is an object with the same field names. The outer types
are made from the inner ones, so that a new field shows up here by itself; only what differs in shape is written out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Union, get_args, get_origin

import msgspec

from raftmeta.core import types
from raftmeta.core.types import VersionRecord

encode = msgspec.json.Encoder().encode

_twins: dict[type, type[msgspec.Struct]] = {}


def twin(record: type[msgspec.Struct], name: str = "") -> type[msgspec.Struct]:
    """The object type with the fields of an array type, all the way down."""
    if record not in _twins:
        fields = [(field.encode_name, _outer(field.type)) for field in msgspec.structs.fields(record)]
        _twins[record] = msgspec.defstruct(name or record.__name__, fields, frozen=True, module=__name__, gc=False)
    return _twins[record]


def _outer(shape: Any) -> Any:
    if isinstance(shape, type) and issubclass(shape, msgspec.Struct):
        return twin(shape)
    arguments = get_args(shape)
    if get_origin(shape) is tuple:
        return tuple[_outer(arguments[0]), ...]  # type: ignore[misc]
    if type(None) in arguments:
        return Union[tuple(_outer(argument) for argument in arguments)]  # noqa: UP007 - built at run time
    return shape


Model = twin(types.ModelRecord, "Model")
Deployment = twin(types.Deployment)
Rollout = twin(types.Rollout)


class Version(msgspec.Struct, frozen=True, gc=False):
    """A published version: its record with the summary's fields beside the others."""

    model: str
    label: str
    number: int
    checksum: str
    config_digest: str
    weights_digest: str
    vector_root: str
    manifest_digest: str
    size_bytes: int
    weights_bytes: int
    file_count: int
    tensor_count: int
    principal: str
    published_revision: int
    published_ms: int


Evidence = twin(types.Evidence)


Basis = twin(types.Basis)


class Verdict(msgspec.Struct, frozen=True):
    """A result of a consistency check."""

    deployment: str
    verdict: str
    report: dict[str, Any] | None  # None of one that a later verdict followed
    principal: str
    revision: int
    recorded_ms: int
    basis: Basis | None  # type: ignore[valid-type]
    summary: str


def version(record: VersionRecord) -> Version:
    s = record.summary
    return Version(
        record.model, record.label, record.number, s.checksum, s.config_digest, s.weights_digest, s.vector_root, s.manifest_digest,
        s.size_bytes, s.weights_bytes, s.file_count, s.tensor_count, record.principal, record.published_revision, record.published_ms,
    )  # fmt: skip


def model(record: types.ModelRecord) -> Any:
    return msgspec.convert(record, Model, from_attributes=True)


def deployment(record: types.Deployment) -> Any:
    return msgspec.convert(record, Deployment, from_attributes=True)


def rollout(record: types.Rollout) -> Any:
    return msgspec.convert(record, Rollout, from_attributes=True)


def evidence(record: types.Evidence) -> Any:
    return msgspec.convert(record, Evidence, from_attributes=True)


def verdict(record: types.Verdict) -> Any:
    """The report is JSON that was checked before it was proposed, and is passed on as it is."""
    return {
        "deployment": record.deployment,
        "verdict": record.verdict,
        "report": msgspec.Raw(record.report),
        "principal": record.principal,
        "revision": record.revision,
        "recorded_ms": record.recorded_ms,
        "basis": None if record.basis is None else msgspec.convert(record.basis, Basis, from_attributes=True),
        "summary": record.summary,
    }


RENDER: dict[str, Callable[[Any], Any]] = {
    "model": model,
    "version": version,
    "deployment": deployment,
    "rollout": rollout,
    "verdict": verdict,
    "evidence": evidence,
}
