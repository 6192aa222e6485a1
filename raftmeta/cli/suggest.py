"""The nearest name to a mistyped one. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_ALIASES = {  # words of neighbouring tools, and where they lead here
    "deployments": "status",
    "get": "status",
    "ls": "versions",
    "list": "versions",
    "models": "versions",
    "rollout": "activate",
    "promote": "activate",
    "switch": "activate",
    "undo": "rollback",
    "revert": "rollback",
    "push": "publish",
    "upload": "publish",
    "register": "publish",
    "serve": "server",
    "start": "server",
    "members": "cluster status",
    "health": "cluster status",
    "verify": "check",
    "diff": "check",
    "events": "watch",
    "declare": "deploy",
    "create": "deploy",
    "cancel": "abort",
}


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name that was most likely meant, None when none is near."""
    known = list(names)
    lowered = word.lower()
    if _ALIASES.get(lowered) in known:
        return _ALIASES[lowered]
    close = get_close_matches(lowered, known, n=1, cutoff=0.55)
    if close:
        return close[0]
    starting = [name for name in known if name.startswith(lowered)] if lowered else []
    return starting[0] if len(starting) == 1 else None
