"""Request bodies: strict JSON of a known shape, or an error that names the place.

A body is decoded once into its frozen type. Duplicate keys are found without a second parse in the common case: the decoded value is
encoded again and must hold as many colons as the body, since every dropped key takes its colon along. That count is exact only for text
without escapes and for types whose defaults are left out when encoded, so anything else takes the slow way, a full strict parse. Whether a
failure is the JSON's (`bad_json`) or the value's (`bad_field`) is decided on the slow way too.
"""

from __future__ import annotations

import difflib
import re
from typing import Any, Generic, TypeVar, get_args, get_origin

import msgspec

from raftmeta import strict_json
from raftmeta.core.errors import RaftmetaError

MAX_DEPTH = 64
T = TypeVar("T", bound=msgspec.Struct)

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*?)`(?: - at `(?P<path>\$[^`]*)`)?\Z", re.DOTALL)
_STEP = re.compile(r"\.(?P<name>[A-Za-z_]\w*)|\[(?P<index>\d+|\.\.\.)\]")
_encode = msgspec.json.Encoder().encode


class Body(Generic[T]):
    """Decoder of one body type."""

    def __init__(self, shape: type[T], *, free_form: bool = False) -> None:
        """Raises TypeError unless the type and all structs below it forbid unknown fields and omit defaults: a default that was added would
        make up for a repeated key that was dropped."""
        for struct in _structs(shape):
            config = struct.__struct_config__
            if not config.forbid_unknown_fields or (not config.omit_defaults and any(map(_has_default, msgspec.structs.fields(struct)))):
                raise TypeError(f"{struct.__name__}, in {shape.__name__}, must forbid unknown fields and omit defaults")
        self.shape = shape
        self._free_form = free_form  # holds JSON of any shape, whose depth must be looked at
        self._decode = msgspec.json.Decoder(shape).decode

    def decode(self, data: bytes) -> T:
        """Raises RaftmetaError bad_json or bad_field."""
        try:
            value = self._decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeError) as cause:
            _scan(data)
            raise self._fault(str(cause)) from cause
        if self._free_form or b"\\" in data or _encode(value).count(b":") != data.count(b":"):
            _scan(data)
        return value

    def _fault(self, text: str) -> RaftmetaError:
        unknown = _UNKNOWN.match(text)
        if unknown is None:
            # The strict parse took it, so what msgspec minds is the value; only its text rules (escapes) are stricter.
            return RaftmetaError("bad_field", _shorten(text))
        field, path = unknown["field"], unknown["path"] or "$"
        known = _fields_at(self.shape, path)
        nearest = difflib.get_close_matches(field, known, 1, cutoff=0.5)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; known are {', '.join(known)}" if known else ""
        return RaftmetaError("bad_field", f"unknown field {_shorten(field)!r} at {_shorten(path)}{hint}")


def _structs(shape: Any, known: frozenset[type[msgspec.Struct]] = frozenset()) -> frozenset[type[msgspec.Struct]]:
    """All structs that a value of this type may hold, with itself."""
    if _is_struct(shape):
        if shape in known:
            return known
        known |= {shape}
        inner = [field.type for field in msgspec.structs.fields(shape)]
    else:
        inner = [shape.__origin__] if hasattr(shape, "__metadata__") else list(get_args(shape))
    for each in inner:
        known = _structs(each, known)
    return known


def _has_default(field: msgspec.structs.FieldInfo) -> bool:
    return not field.required


def _scan(data: bytes) -> None:
    """The exact judgement: raises RaftmetaError bad_json for anything that is not strict JSON of bounded depth."""
    strict_json.loads(data, max_depth=MAX_DEPTH)


def _fields_at(shape: Any, path: str) -> list[str]:
    """Names of the fields of the struct at this place of a body, [] when the place is no struct."""
    for step in _STEP.finditer(path):
        if step["name"]:
            types = {field.encode_name: field.type for field in msgspec.structs.fields(shape)} if _is_struct(shape) else {}
            shape = _unwrapped(types.get(step["name"]))
        else:
            inner = [arg for arg in get_args(shape) if arg is not Ellipsis]
            shape = _unwrapped(inner[-1]) if inner else None
    return [field.encode_name for field in msgspec.structs.fields(shape)] if _is_struct(shape) else []


def _unwrapped(shape: Any) -> Any:
    """Without Annotated and Optional."""
    while hasattr(shape, "__metadata__"):
        shape = shape.__origin__
    if get_origin(shape) not in (tuple, dict, list):
        for option in get_args(shape):
            if option is not type(None):
                return _unwrapped(option)
    return shape


def _is_struct(shape: Any) -> bool:
    return isinstance(shape, type) and issubclass(shape, msgspec.Struct)


def _shorten(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "…"
