"""What a question for vectors may say in its query, and the call to control that it becomes. Pure.

    /raftmeta/v1/vector/{deployment}   entries=0|1 | blocks=TENSOR [published=1] | sha256=1 [after=TENSOR] [limit_bytes=N]
    /raftmeta/v1/vector                [deployments=NAME,NAME...] [max_age_ms=N]
    both                               [wait_s=N]: how long the asker waits, so that an answer which takes longer is given up here too

A name that is not known, stands twice, or contradicts another one is refused: nobody gets an answer to another question than was meant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl

from node_agent.digests import MAX_PAGE_BYTES
from node_agent.messages import GetDigests, GetVector, GetVectors, Numbered
from node_agent.routes import VECTOR_QUERY, VECTORS_QUERY
from node_agent.serve import ServeError
from raftmeta.core.manifest import NAME

WAIT_S = 30  # the vector of a large slot takes seconds
MAX_WAIT_S = 3_600
MAX_AGE_MS = 30 * 86_400_000
MAX_DEPLOYMENTS = 1_000


class Asked(NamedTuple):
    make: Callable[[int], Numbered]
    wait_s: float


def of_one(deployment: str, query: bytes) -> Asked:
    """Raises ServeError 400."""
    given = _pairs(query, VECTOR_QUERY)
    wait_s = _number(given, "wait_s", WAIT_S, 1, MAX_WAIT_S)
    entries, sha256, published = _flag(given, "entries"), _flag(given, "sha256"), _flag(given, "published")
    if entries + sha256 + ("blocks" in given) > 1:
        raise ServeError(400, "the query asks for one of entries, blocks and sha256 at a time")
    if not sha256 and given.keys() & {"after", "limit_bytes"}:
        raise ServeError(400, "after and limit_bytes go with sha256=1")
    if published and not given.get("blocks"):
        raise ServeError(400, "published goes with blocks=TENSOR")
    if sha256:
        limit = _number(given, "limit_bytes", MAX_PAGE_BYTES, 1, MAX_PAGE_BYTES)
        return Asked(lambda number: GetDigests(number, deployment, given.get("after", ""), limit, wait_s), wait_s)
    return Asked(lambda number: GetVector(number, deployment, entries, given.get("blocks", ""), published, wait_s), wait_s)


def of_all(query: bytes) -> Asked:
    """Raises ServeError 400."""
    given = _pairs(query, VECTORS_QUERY)
    wait_s = _number(given, "wait_s", WAIT_S, 1, MAX_WAIT_S)
    names = tuple(given["deployments"].split(",")) if "deployments" in given else ()
    wrong = next((name for name in names if not NAME.match(name)), None)
    if wrong is not None or len(names) > MAX_DEPLOYMENTS:
        found = f"{wrong[:140]!r}" if wrong is not None else f"{len(names)} names"
        raise ServeError(400, f"deployments takes up to {MAX_DEPLOYMENTS} names with commas between them, found {found}")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ServeError(400, f"deployments names {twice[:140]!r} more than once")
    max_age_ms = _number(given, "max_age_ms", 0, 0, MAX_AGE_MS) if "max_age_ms" in given else None
    return Asked(lambda number: GetVectors(number, names, max_age_ms, wait_s), wait_s)


def _pairs(query: bytes, known: tuple[str, ...]) -> dict[str, str]:
    try:
        pairs = parse_qsl(query.decode(), keep_blank_values=True, strict_parsing=bool(query), max_num_fields=8)
    except ValueError as cause:
        raise ServeError(400, f"the query cannot be read: {cause}") from cause
    given = dict(pairs)
    if len(given) < len(pairs) or not given.keys() <= set(known):
        raise ServeError(400, f"the query takes {', '.join(known)}, each once")
    return given


def _flag(given: Mapping[str, str], name: str) -> bool:
    value = given.get(name, "0")
    if value not in ("0", "1"):
        raise ServeError(400, f"{name} is {value[:40]!r}, expected 0 or 1")
    return value == "1"


def _number(given: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = given.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 15 and least <= int(text) <= most):
        raise ServeError(400, f"{name} is {text[:40]!r}, expected a whole number from {least} to {most}")
    return int(text)
