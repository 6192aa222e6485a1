"""JSON as the API means it: one value, no repeated keys, no NaN or Infinity, bounded in bytes and depth.

The standard decoder takes the last of two equal keys and invents numbers that JSON does not have; both let two readers see two meanings in
one body. Encoding refuses the same things. Raises RaftmetaError `bad_json` or `body_too_large`, nothing else.
"""

from __future__ import annotations

import json
from typing import Any

from raftmeta.core.errors import RaftmetaError

MAX_BYTES = 64 << 20  # a manifest of 200,000 tensors is about 50 MB of JSON


def loads(data: bytes, max_bytes: int = MAX_BYTES) -> Any:
    """The one JSON value of `data`."""
    if len(data) > max_bytes:
        raise RaftmetaError("body_too_large", f"the JSON has {len(data)} bytes, the limit is {max_bytes}")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as cause:
        raise RaftmetaError("bad_json", f"not strict JSON: {cause}") from cause


def load_object(data: bytes, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The JSON object of `data`; any other value is `bad_json`."""
    value = loads(data, max_bytes)
    if not isinstance(value, dict):
        raise RaftmetaError("bad_json", f"expected a JSON object, found {type(value).__name__}")
    return value


def dumps(value: object) -> bytes:
    """Compact UTF-8 JSON. Raises RaftmetaError `bad_json` for what JSON cannot say."""
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as cause:
        raise RaftmetaError("bad_json", f"the value cannot be written as JSON: {cause}") from cause


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:80]!r} stands twice in one object")
            seen.add(key)
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
