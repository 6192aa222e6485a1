"""What holds for every reply that is read over HTTP, whoever asked."""

from __future__ import annotations

from collections.abc import Mapping


def encoding_of(headers: Mapping[str, str]) -> str:
    """How a body is encoded that was asked for as it is, "" when it is not: a packed one of 2 KB can unpack to gigabytes, unread by us."""
    found = headers.get("content-encoding", "").strip().lower()
    return "" if found == "identity" else found[:100]
