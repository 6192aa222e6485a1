"""The OpenAPI document, made from the table of operations: shapes from the msgspec types, an example for every body and answer.

It is built once per process and is a promise: a golden file holds the routes, and a test sends what the document says may be sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from api import query
from api.errors import problem
from api.operation import Answer, Kind, Operation
from api.schemas.examples import PATH
from raftmeta.core.errors import CODES
from raftmeta.core.manifest import LABEL, NAME

_REF = "#/components/schemas/{name}"
_ALWAYS = ("bad_request", "bad_field", "bad_name", "unauthenticated", "forbidden", "overloaded", "too_many_requests", "internal")
_ON_PROCESS = ("bad_request", "bad_field", "internal")
_ON_BODY = ("bad_json", "body_too_large", "unsupported_media_type")
_ON_READ = ("no_leader", "no_quorum", "shutting_down", "stale", "revision_not_reached")
_ON_MUTATION = (
    "disk_full", "idempotency_expired", "idempotency_reused", "no_leader", "no_quorum", "not_applied", "quota_exceeded",
    "revision_not_reached", "shutting_down", "unknown_outcome", "unsupported_command",
)  # fmt: skip

_NUMBER = {"type": "integer", "minimum": 0}
_QUERY: dict[str, tuple[dict[str, Any], str]] = {
    "consistency": (
        {"type": "string", "enum": ["linearizable", "stale"], "default": "linearizable"},
        "`stale` answers from this member at once; X-Raftmeta-Staleness-Ms bounds how old that is",
    ),
    "max_stale_ms": (_NUMBER | {"maximum": query.MAX_STALE_MS}, "With `stale`: refuse to answer from further back"),
    "min_revision": (_NUMBER | {"maximum": query.MAX_REVISION}, "Answer only once this revision is applied here"),
    "limit": ({"type": "integer", "minimum": 1, "maximum": query.MAX_LIMIT, "default": 100}, "Items of one page"),
    "after": ({"type": "string", "maxLength": 512}, "`next` of the page before"),
    "from_revision": (_NUMBER | {"maximum": query.MAX_REVISION}, "Events with a greater revision are sent; the newest one by default"),
    "since": (_NUMBER | {"maximum": query.MAX_REVISION}, "Everything with a greater revision, in order; only the newest without it"),
    "deployment": ({"type": "string", "maxLength": 128}, "Of this deployment only"),
    "to": ({"type": "string", "enum": ["primary", "standby"]}, "The side that is to take requests; the other one by default"),
    "max_verdict_age_ms": (_NUMBER | {"default": 300_000}, "How old the last verdict may be"),
    "at_ms": (_NUMBER | {"maximum": query.MAX_REVISION}, "Unix milliseconds; the newest time of the state by default"),
    "verbose": ({"type": "boolean", "default": False}, "Show every condition, not only those that fail"),
    "resource": ({"type": "string"}, f"Comma-separated: {', '.join(query.RESOURCES)}; everything by default"),
}


def codes_of(operation: Operation) -> tuple[str, ...]:
    """Every error code that this operation can answer with."""
    codes = set(_ALWAYS if operation.action else _ON_PROCESS) | set(operation.errors)
    if operation.body is not None:
        codes |= set(_ON_BODY)
    if operation.kind in (Kind.READ, Kind.LIST):
        codes |= set(_ON_READ)
    if operation.kind is Kind.MUTATION:
        codes |= set(_ON_MUTATION)
    return tuple(sorted(codes))


def parameters_of(operation: Operation) -> tuple[str, ...]:
    """Names of its query parameters."""
    return query.KNOWN[operation.kind] + operation.extra_query


def document(operations: Sequence[Operation], version: str) -> dict[str, Any]:
    shapes = [answer.shape for operation in operations for answer in operation.answers if answer.shape is not None]
    shapes += [operation.body.shape for operation in operations if operation.body is not None]
    refs, components = msgspec.json.schema_components(shapes, ref_template=_REF)
    by_shape = {id(shape): ref for shape, ref in zip(shapes, refs, strict=True)}
    components["Problem"] = _problem_schema()
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, by_shape)
    made = {
        "openapi": "3.1.0",
        "info": {
            "title": "raftmeta",
            "version": version,
            "description": "Which model weights serve where: one member of the cluster. Any member takes any call.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "headers": _HEADER_COMPONENTS,
            "examples": {code: {"value": problem(code, f"what was expected, and what was found: {code}")} for code in sorted(CODES)},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }
    return _portable(made)  # type: ignore[no-any-return]


def _operation(operation: Operation, by_shape: dict[int, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.what,
        "tags": [operation.path.split("/")[2] if operation.path.startswith("/v1/") else "process"],
        "parameters": _parameters(operation),
        "responses": {},
    }
    if operation.body is not None:
        content = {"schema": by_shape[id(operation.body.shape)], "example": operation.example}
        made["requestBody"] = {"required": not operation.body_optional, "content": {"application/json": content}}
    for answer in operation.answers:
        made["responses"][str(answer.status)] = _answer(answer, by_shape)
    for status, codes in _by_status(codes_of(operation)).items():
        made["responses"][status] = _problem_answer(codes)
    if not operation.path.startswith("/v1/"):
        made["security"] = []
    return made


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    made = []
    for name in re.findall(r"{(\w+)}", operation.path):
        pattern = LABEL if name == "label" else NAME
        schema = {"type": "string", "pattern": f"^{pattern.pattern}"}
        made.append({"name": name, "in": "path", "required": True, "schema": schema, "example": PATH[name]})
    for name in parameters_of(operation):
        schema, what = _QUERY[name]
        made.append({"name": name, "in": "query", "required": False, "schema": schema, "description": what})
    if operation.kind is Kind.MUTATION:
        what = "Repeat a request under its key and it is applied once; made by the member when left out"
        schema = {"type": "string", "pattern": "^[!-~]{1,128}$"}
        made.append({"name": "Idempotency-Key", "in": "header", "required": False, "schema": schema, "description": what})
    return made


def _answer(answer: Answer, by_shape: dict[int, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"description": answer.what, "headers": _HEADERS}
    if answer.shape is not None:
        made["content"] = {"application/json": {"schema": by_shape[id(answer.shape)], "example": answer.example}}
    elif answer.example is not None:
        made["content"] = {answer.media: {"schema": {"type": "string"}, "example": answer.example}}
    return made


def _by_status(codes: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for code in codes:
        found.setdefault(str(CODES[code].status), []).append(code)
    return dict(sorted(found.items()))


def _problem_answer(codes: list[str]) -> dict[str, Any]:
    examples = {code: {"$ref": f"#/components/examples/{code}"} for code in codes}
    return {
        "description": "; ".join(f"`{code}`: {CODES[code].title}" for code in codes),
        "headers": _PROBLEM_HEADERS,
        "content": {"application/problem+json": {"schema": {"$ref": _REF.format(name="Problem")}, "examples": examples}},
    }


def _problem_schema() -> dict[str, Any]:
    text = {"type": "string"}
    return {
        "title": "Problem",
        "description": "An error (RFC 9457). `code` is stable; `class` says what to do next. Further members depend on the code.",
        "type": "object",
        "properties": {
            "type": text | {"pattern": "^urn:raftmeta:error:[a-z_]+$"},
            "title": text,
            "status": {"type": "integer"},
            "detail": text,
            "code": {"enum": sorted(CODES)},
            "class": {"enum": sorted({info.error_class.value for info in CODES.values()})},
        },
        "required": ["type", "title", "status", "detail", "code", "class"],
    }


_HEADERS = {name: {"$ref": f"#/components/headers/{name}"} for name in ("X-Raftmeta-Revision", "X-Raftmeta-Generation")}
_HEADER_COMPONENTS = {
    "X-Raftmeta-Revision": {"schema": {"type": "integer"}, "description": "Revision that the reply was served at, or of the outcome"},
    "X-Raftmeta-Generation": {"schema": {"type": "integer"}, "description": "Rises at every forced recovery"},
    "X-Raftmeta-Judged": {"schema": {"const": "true"}, "description": "The refusal is the outcome of the command itself"},
}
_PROBLEM_HEADERS = _HEADERS | {"X-Raftmeta-Judged": {"$ref": "#/components/headers/X-Raftmeta-Judged"}}


def _portable(value: Any) -> Any:
    """Python's `\\Z` as the `$` of JSON Schema's expressions."""
    if isinstance(value, dict):
        return {
            key: item.replace(r"\Z", "$") if key == "pattern" and isinstance(item, str) else _portable(item) for key, item in value.items()
        }
    if isinstance(value, list):
        return [_portable(item) for item in value]
    return value
