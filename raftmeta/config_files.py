"""Which of the three configuration files one is, told by a setting that only it has: one is easily given where another is wanted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from raftmeta.core.errors import RaftmetaError

_SIGNS = {"urls": "client.toml", "member_id": "server.toml", "node": "agent.toml"}


def require_own(path: Path, found: Iterable[str], known: Iterable[str]) -> None:
    """`found`: the settings that are in the file, `known`: those that are wanted. Raises RaftmetaError bad_field for another kind of it."""
    found, known = set(found), set(known)
    other = next((name for sign, name in _SIGNS.items() if sign in found - known), None)
    wanted = next((name for sign, name in _SIGNS.items() if sign in known), None)
    if other is not None and wanted is not None:
        raise RaftmetaError("bad_field", f"{path} looks like {_article(other)}; {_article(wanted)} as `raftmeta init` writes it is wanted")


def _article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"
