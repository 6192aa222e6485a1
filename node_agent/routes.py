"""What the serving port answers to: one table from path to kind, methods and the action that a caller needs a role for. Pure.

A path is split before it is decoded, so that an encoded slash is part of a name and never a separator. What is in no row is not there,
whoever asks: 404 and 405 tell nothing about the node. Everything about one route, its body included, is judged after its caller was.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from node_agent.serve import ServeError
from raftmeta.core.manifest import LABEL, NAME

LOOK = ("GET", "HEAD")
VECTOR_QUERY = ("entries", "blocks", "published", "sha256", "after", "limit_bytes", "wait_s")  # what may follow the path of a vector
VECTORS_QUERY = ("deployments", "max_age_ms", "wait_s")  # what may follow that of all vectors of the node
PROTOCOL = "/v2"  # below it, errors have the body of the Open Inference Protocol


class Kind(StrEnum):
    LIVE = "live"
    READY = "ready"
    SERVER = "server"
    MODEL = "model"
    MODEL_READY = "model_ready"
    INFER = "infer"
    METRICS = "metrics"
    STATUS = "status"
    VECTOR = "vector"
    VECTORS = "vectors"
    EVIDENCE = "evidence"


class Row(NamedTuple):
    path: str  # segments in braces are names
    kind: Kind
    action: str  # as in raftmeta.security.roles
    methods: tuple[str, ...] = LOOK


class Route(NamedTuple):
    row: Row
    model: str = ""
    version: str = ""  # "" when the path pins none
    deployment: str = ""


ROUTES = (
    Row("/v2/models/{model}/infer", Kind.INFER, "infer", ("POST",)),
    Row("/v2/models/{model}/versions/{version}/infer", Kind.INFER, "infer", ("POST",)),
    Row("/v2/models/{model}", Kind.MODEL, "infer"),
    Row("/v2/models/{model}/versions/{version}", Kind.MODEL, "infer"),
    Row("/v2/models/{model}/ready", Kind.MODEL_READY, "infer"),
    Row("/v2/models/{model}/versions/{version}/ready", Kind.MODEL_READY, "infer"),
    Row("/v2", Kind.SERVER, "infer"),
    Row("/v2/", Kind.SERVER, "infer"),  # the protocol's text names the one, its OpenAPI file the other
    Row("/v2/health/live", Kind.LIVE, "health"),
    Row("/v2/health/ready", Kind.READY, "health"),
    Row("/livez", Kind.LIVE, "health"),
    Row("/readyz", Kind.READY, "health"),
    Row("/metrics", Kind.METRICS, "metrics"),
    Row("/raftmeta/v1/status", Kind.STATUS, "inspect"),
    Row("/raftmeta/v1/slots", Kind.STATUS, "inspect"),
    Row("/raftmeta/v1/vector", Kind.VECTORS, "inspect"),
    Row("/raftmeta/v1/vector/{deployment}", Kind.VECTOR, "inspect"),
    Row("/raftmeta/v1/evidence/{deployment}", Kind.EVIDENCE, "inspect"),
)
_SPLIT = tuple((row, row.path.split("/")) for row in ROUTES)


def find(raw_path: bytes, method: str) -> Route:
    """The route of a request line, its path still encoded. Raises ServeError 404, or 405 with the methods that the path takes."""
    segments = segments_of(raw_path)
    for row, template in _SPLIT:
        if len(template) != len(segments):
            continue
        names = {want[1:-1]: have for want, have in zip(template, segments, strict=True) if want.startswith("{")}
        if any(want != have for want, have in zip(template, segments, strict=True) if not want.startswith("{")):
            continue
        route = _checked(row, names)
        if method not in row.methods:
            allow = ", ".join(row.methods)
            raise ServeError(405, f"the resource takes {allow}, found {method[:20]}", headers=((b"allow", allow.encode()),))
        return route
    raise ServeError(404, f"no such resource: {'/'.join(segments)[:200]}")


def speaks_protocol(raw_path: bytes) -> bool:
    """Does who asks for this path expect the errors of the Open Inference Protocol?"""
    return segments_of(raw_path)[:2] == PROTOCOL.split("/")


def segments_of(raw_path: bytes) -> list[str]:
    return [unquote_to_bytes(part).decode("utf-8", "replace") for part in raw_path.split(b"/")]


def _checked(row: Row, names: Mapping[str, str]) -> Route:
    for kind, name in names.items():
        if kind == "version" and not LABEL.match(name):
            raise ServeError(404, f"{name[:140]!r} is no version label")
        if kind != "version" and not NAME.match(name):
            raise ServeError(404, f"{name[:140]!r} is no {kind} name", code=f"unknown_{kind}")
    return Route(row, **names)
