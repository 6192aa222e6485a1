"""Text of other machines on a terminal: whatever could move the cursor, colour, or hide something is shown as an escape. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

_MAYBE_UNPRINTABLE = re.compile(r"[^\n -~]")


def printable(value: Any) -> str:
    """Of one line; the end of a line is escaped too."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(value))


def json_text(value: object, indent: int | None = None) -> str:
    """The same value to every reader of JSON. Such characters stand only in its strings, where their escapes mean the same."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return _MAYBE_UNPRINTABLE.sub(lambda found: found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1], text)
