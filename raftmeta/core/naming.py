"""Many names in one sentence. Pure."""

from __future__ import annotations

from collections.abc import Sequence

NAMED = 3


def named(names: Sequence[str]) -> str:
    """The first of them, and how many others there are."""
    others = f" and {len(names) - NAMED} others" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{others}"
