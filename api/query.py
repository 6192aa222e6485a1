"""Query strings and header fields, decoded strictly: an unknown or repeated parameter is an error, since a typing mistake in
`consistency=stlae` must not quietly answer something else."""

from __future__ import annotations

import difflib
from urllib.parse import parse_qsl

from api.operation import Kind, Operation, Query
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import NAME
from raftmeta.core.types import SideName

MAX_QUERY_BYTES = 2_048
MAX_LIMIT = 1_000
MAX_REVISION = 1 << 62
MAX_STALE_MS = 86_400_000
RESOURCES = {
    "models": "model",
    "versions": "version",
    "deployments": "deployment",
    "rollouts": "rollout",
    "verdicts": "verdict",
    "evidence": "evidence",
}

_READ = ("consistency", "max_stale_ms", "min_revision")
KNOWN: dict[Kind, tuple[str, ...]] = {
    Kind.READ: _READ,
    Kind.LIST: (*_READ, "limit", "after"),
    Kind.MUTATION: (),
    Kind.DIRECT: (),
}
_LINEARIZABLE = Query()
_STALE = Query(stale=True)


def decode(raw: bytes, operation: Operation) -> Query:
    """Raises RaftmetaError bad_field or bad_request."""
    if not raw:
        return _LINEARIZABLE
    if raw == b"consistency=stale" and operation.kind in (Kind.READ, Kind.LIST):
        return _STALE
    known = KNOWN[operation.kind] + operation.extra_query
    given = _pairs(raw, known)
    return Query(
        stale=_consistency(given),
        max_stale_ms=_number(given, "max_stale_ms", 0, MAX_STALE_MS),
        min_revision=_number(given, "min_revision", 0, MAX_REVISION) or 0,
        limit=_number(given, "limit", 1, MAX_LIMIT) or _LINEARIZABLE.limit,
        after=given.get("after"),
        at_ms=_number(given, "at_ms", 0, MAX_REVISION),
        from_revision=_number(given, "from_revision", 0, MAX_REVISION),
        resource=_resources(given.get("resource")),
        verbose=_flag(given, "verbose"),
        since=_number(given, "since", 0, MAX_REVISION),
        deployment=_name(given, "deployment"),
        to=_side(given, "to"),
        max_verdict_age_ms=_number(given, "max_verdict_age_ms", 0, MAX_REVISION),
    )


def _pairs(raw: bytes, known: tuple[str, ...]) -> dict[str, str]:
    if len(raw) > MAX_QUERY_BYTES:
        raise RaftmetaError("bad_request", f"the query string has {len(raw)} bytes, the limit is {MAX_QUERY_BYTES}")
    try:
        pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict")
    except ValueError as cause:
        raise RaftmetaError("bad_request", f"the query string cannot be read: {cause}") from cause
    given: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1, cutoff=0.5)
            takes = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(known)}" if known else "none is known here"
            raise RaftmetaError("bad_field", f"unknown query parameter {name[:80]!r}; {takes}")
        if name in given:
            raise RaftmetaError("bad_field", f"the query parameter {name!r} stands twice")
        given[name] = value
    return given


def _consistency(given: dict[str, str]) -> bool:
    value = given.get("consistency", "linearizable")
    if value not in ("linearizable", "stale"):
        raise RaftmetaError("bad_field", f"consistency is {value[:40]!r}, expected linearizable or stale")
    if value == "linearizable" and "max_stale_ms" in given:
        raise RaftmetaError("bad_field", "max_stale_ms is given without consistency=stale")
    return value == "stale"


def _number(given: dict[str, str], name: str, least: int, most: int) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and least <= int(text) <= most):
        raise RaftmetaError("bad_field", f"{name} is {text[:40]!r}, expected a whole number from {least} to {most}")
    return int(text)


def _name(given: dict[str, str], name: str) -> str | None:
    text = given.get(name)
    if text is not None and not NAME.match(text):
        raise RaftmetaError("bad_name", f"{name} {text[:80]!r} is not of the form {NAME.pattern[:-2]}")
    return text


def _side(given: dict[str, str], name: str) -> SideName | None:
    text = given.get(name)
    if text is not None and text not in tuple(SideName):
        raise RaftmetaError("bad_field", f"{name} is {text[:40]!r}, expected {' or '.join(SideName)}")
    return None if text is None else SideName(text)


def _flag(given: dict[str, str], name: str) -> bool:
    value = given.get(name, "false")
    if value not in ("", "1", "true", "0", "false"):
        raise RaftmetaError("bad_field", f"{name} is {value[:40]!r}, expected true or false")
    return value in ("", "1", "true")


def _resources(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    kinds = []
    for word in text.split(","):
        kind = RESOURCES.get(word)
        if kind is None:
            raise RaftmetaError("bad_field", f"resource {word[:40]!r} is not one of {', '.join(RESOURCES)}")
        kinds.append(kind)
    return tuple(dict.fromkeys(kinds))
