"""What handlers share: the refusal value and the checks of fields.

A check returns a refusal or None, so that a handler reads as a list of preconditions. Details name the thing, what was expected and
what was found, and are cut so that a stored outcome stays small whatever the command held. Foreign text is shown with `!a`: what `!r`
escapes depends on the Unicode tables of the interpreter, and a stored detail must be the same bytes on every replica.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from raftmeta.core.manifest import LABEL, NAME
from raftmeta.core.state import MAX_INT
from raftmeta.core.types import VersionSummary

MAX_DETAIL = 1_024  # characters of a text that an agent or operator adds
SHOWN = 80  # characters of a foreign text inside a detail

FAILURE_CODE = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")
_HEX = b"0123456789abcdef"
_GAPS = "    "  # between five digests
_encode = msgspec.msgpack.Encoder(order="deterministic").encode


class Refusal(NamedTuple):
    """Why a command changed nothing. `result` helps the caller go on, e.g. the id of the running rollout."""

    code: str
    detail: str
    result: bytes = b""


def result(**values: str | int | list[str] | list[int]) -> bytes:
    """Canonical bytes of an outcome's result."""
    return _encode(values)


def name_fault(what: str, name: str) -> Refusal | None:
    if NAME.match(name):
        return None
    return Refusal("bad_name", f"{what} {name[:SHOWN]!a} is outside [a-z0-9][a-z0-9._-]{{0,127}}")


def code_fault(what: str, code: str) -> Refusal | None:
    if FAILURE_CODE.match(code):
        return None
    return Refusal("bad_field", f"{what} {code[:SHOWN]!a} is outside [a-z][a-z0-9_]{{0,63}}")


def label_fault(label: str) -> Refusal | None:
    if LABEL.match(label):
        return None
    return Refusal("bad_name", f"label {label[:SHOWN]!a} is outside [A-Za-z0-9][A-Za-z0-9._+-]{{0,127}}")


def is_digest(text: str) -> bool:
    """64 lower-case hex characters."""
    return len(text) == 64 and not text.encode().translate(None, _HEX)


def int_fault(what: str, value: int, low: int = 0, high: int = MAX_INT) -> Refusal | None:
    if low <= value <= high:
        return None
    return Refusal("bad_field", f"{what} is {value}, expected {low}..{high}")


def summary_fault(summary: VersionSummary) -> Refusal | None:
    """Judges the five digests in one go, and the four numbers in another: this runs for every publish."""
    digests = f"{summary.checksum} {summary.config_digest} {summary.weights_digest} {summary.vector_root} {summary.manifest_digest}"
    if len(digests) != 324 or digests[64::65] != _GAPS or digests.encode().translate(None, _HEX) != b"    ":
        return _digest_fault(summary)
    if (summary.size_bytes | summary.weights_bytes | summary.file_count | summary.tensor_count) >> 63:
        return _number_fault(summary)
    return None


def _digest_fault(summary: VersionSummary) -> Refusal:
    fields = ("checksum", "config_digest", "weights_digest", "vector_root", "manifest_digest")
    field = next(field for field in fields if not is_digest(getattr(summary, field)))
    return Refusal("bad_field", f"summary: {field} {getattr(summary, field)[:SHOWN]!a} is not 64 lower-case hex characters")


def _number_fault(summary: VersionSummary) -> Refusal:
    fields = ("size_bytes", "weights_bytes", "file_count", "tensor_count")
    field = next(field for field in fields if not 0 <= getattr(summary, field) <= MAX_INT)
    return Refusal("bad_field", f"summary: {field} is {getattr(summary, field)}, expected 0..{MAX_INT}")
