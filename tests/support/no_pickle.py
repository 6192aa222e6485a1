"""An audit hook for the whole test suite: nobody reads a pickle (N1, N5).

Unpickling looks up classes by name, and that is what runs foreign code; the interpreter announces each look-up as `pickle.find_class`. The
hook raises there. Libraries that unpickle their own compiled code are let through by the module that calls. A hook cannot be removed, so
it is installed once per process.
"""

from __future__ import annotations

import sys
from types import FrameType

TRUSTED = ("numba", "llvmlite", "torch")  # read back only what they wrote in this process or in their own cache

_SKIPPED = ("pickle", "_compat_pickle", __name__)
_installed = False


class PickleRead(AssertionError):
    """Something tried to read a pickle."""


def forbid_pickle() -> None:
    """Install the hook; a second call does nothing."""
    global _installed
    if not _installed:
        _installed = True
        sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if event == "pickle.find_class":
        caller = _caller(sys._getframe(1))
        if caller.partition(".")[0] not in TRUSTED:
            raise PickleRead(f"{caller or 'somebody'} reads a pickle that names {arguments}")


def _caller(frame: FrameType | None) -> str:
    """Module of the innermost frame outside pickle's own code."""
    while frame is not None and frame.f_globals.get("__name__") in _SKIPPED:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")) if frame is not None else ""
