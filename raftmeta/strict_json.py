"""JSON as the product means it: one value, no repeated keys, no NaN or Infinity, text that is text, bounded in bytes and depth.

The standard decoder takes the last of two equal keys, invents numbers that JSON does not have and hands out halves of surrogate pairs; each
lets two readers see two meanings in one body. Encoding refuses the same things. Members, client, agents and the command line read JSON
here and nowhere else. Raises RaftmetaError `bad_json` or `body_too_large`, nothing else.
"""

from __future__ import annotations

import json
import re
from typing import Any

from raftmeta.core.errors import RaftmetaError

MAX_BYTES = 64 << 20  # a manifest of 200,000 tensors is about 50 MB of JSON
MAX_DEPTH = 128  # twice what the API takes from a caller, whose values its replies nest a little deeper

_CONTAINERS = frozenset((dict, list))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def loads(data: bytes, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH) -> Any:
    """The one JSON value of `data`."""
    if len(data) > max_bytes:
        raise RaftmetaError("body_too_large", f"the JSON has {len(data)} bytes, the limit is {max_bytes}")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as cause:
        raise RaftmetaError("bad_json", f"not strict JSON: {cause}") from cause
    _refuse_depth(value, max_depth)
    if _SURROGATE.search(data):
        _refuse_halves(value)
    return value


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
                raise ValueError(f"the key {key[:80]!a} stands twice in one object")
            seen.add(key)
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _refuse_depth(value: Any, max_depth: int) -> None:
    level, depth = [value] if isinstance(value, dict | list) else [], 0
    while level:
        depth += 1
        if depth > max_depth:
            raise RaftmetaError("bad_json", f"nested deeper than {max_depth} levels")
        level = [below for item in level if _nests(item) for below in _inside(item) if isinstance(below, dict | list)]


def _refuse_halves(value: Any) -> None:
    level = [value]
    while level:
        for item in level:
            texts = item if isinstance(item, dict) else (item,) if isinstance(item, str) else ()
            for text in texts:
                if not _is_text(text):
                    raise RaftmetaError("bad_json", f"the string {text[:40]!a} holds half a surrogate pair")
        level = [below for item in level if isinstance(item, dict | list) for below in _inside(item)]


def _nests(item: dict[str, Any] | list[Any]) -> bool:
    """Asked first, since it takes a tenth of the time of a loop over millions of numbers."""
    return not _CONTAINERS.isdisjoint(map(type, _inside(item)))


def _inside(item: dict[str, Any] | list[Any]) -> Any:
    return item.values() if isinstance(item, dict) else item


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
