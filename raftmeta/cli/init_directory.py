"""The directory in which `init` works before it is renamed to the one that was asked for.

It holds the key of the authority, so it is never left behind: not by an error, nor by a signal that ends the process, and what a process
that was killed outright left is removed by the next `init` of the same target. A lock on the directory tells one that is in use from that.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from raftmeta.durable import OsDisk

TRIES = 10  # to make one that a process which looks for what was left over does not take for such


@contextmanager
def working_directory(target: Path) -> Iterator[Path]:
    """A new directory beside the target, locked while it is in use; whatever is still there at the end is removed."""
    path, lock = _new_directory(target)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_left_over(target: Path) -> None:
    """Working directories of this target that no process holds."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.tmp\Z")
    for name in OsDisk().listdir(target.parent):
        path = target.parent / name
        if not pattern.match(name) or path.is_symlink() or not path.is_dir():
            continue
        lock = _locked(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


@contextmanager
def ended_by_signal() -> Iterator[None]:
    """SIGTERM ends what is within as an exception does, which cleans up, and then the process as it would have. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # once is enough
        raise _Ended

    former = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except _Ended:
        signal.signal(signal.SIGTERM, former)
        os.kill(os.getpid(), signal.SIGTERM)
        raise KeyboardInterrupt from None  # whoever handles the signal goes on after it
    finally:
        signal.signal(signal.SIGTERM, former)


class _Ended(BaseException):
    """SIGTERM came."""


def _new_directory(target: Path) -> tuple[Path, int]:
    """Its path and the descriptor that holds its lock."""
    for _ in range(TRIES):
        path = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        OsDisk().make_directory(path)
        lock = _locked(path)
        if lock is not None:
            if path.exists():
                return path, lock
            os.close(lock)
    raise AssertionError(f"{TRIES} new directories beside {target} were removed at once")


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock of the directory; None when another process does, or it is gone."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock
