"""Child processes of the demo: started in their own groups, logged to files, ended by id, never left behind.

Each child is told by the kernel when this process dies, so even a killed demo leaves nothing running. Standard output and error go to one
file per process; the tail of it is what a failure shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from raftmeta.cli.demo.errors import DemoError

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
POLL_S = 0.02
TAIL_LINES = 15


class Child:
    """One started process."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path, ends: bool) -> None:
        self.name = name
        self.log = log
        self.ends = ends  # by itself, when its work is done
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """SIGKILL to the process alone, the way a machine dies; reaped at once."""
        self._process.kill()
        self._process.wait(10)

    def signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def tail(self) -> str:
        """The last lines of its log, safe for a terminal."""
        try:
            with self.log.open(encoding="utf-8", errors="replace") as file:
                lines = deque(file, TAIL_LINES)
        except OSError as fault:
            return f"(no log: {fault})"
        return "".join(char if char.isprintable() or char == "\n" else "?" for char in "".join(lines)).rstrip() or "(empty log)"


class Children:
    """All processes of one demo; ends them when the block ends."""

    def __init__(self, log_dir: Path, environment: Mapping[str, str]) -> None:
        self._log_dir = log_dir
        self.environment = {**os.environ, **environment}
        self._running: dict[str, Child] = {}

    def __enter__(self) -> Children:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_all()

    def start(self, name: str, arguments: Sequence[str], ends: bool = False) -> Child:
        """Run `python ARGUMENTS` in the background; a name that was used before appends to its log."""
        log = self._log_dir / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
                preexec_fn=_die_with(os.getpid()),
            )
        child = Child(name, process, log, ends)
        self._running[name] = child
        return child

    def fallen(self) -> Child | None:
        """A process that ended and should not have."""
        return next((child for child in self._running.values() if not child.ends and child.exit_code() is not None), None)

    def forget(self, child: Child) -> None:
        """It ended as intended."""
        self._running.pop(child.name, None)

    def stop_all(self, patience_s: float = 10.0) -> None:
        """SIGTERM to every group, newest first; SIGKILL to what is left after `patience_s`."""
        children = list(reversed(self._running.values()))
        self._running.clear()
        for child in children:
            child.signal_group(signal.SIGTERM)
        deadline = time.monotonic() + patience_s
        while any(child.exit_code() is None for child in children) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for child in children:
            child.signal_group(signal.SIGKILL)  # also what a child may have left in its group
            child.kill()


async def run_to_end(child: Child, timeout_s: float) -> None:
    """Wait for a process that ends by itself. Raises DemoError with the tail of its log unless it ends with 0 in time."""
    deadline = time.monotonic() + timeout_s
    while child.exit_code() is None:
        if time.monotonic() >= deadline:
            child.signal_group(signal.SIGKILL)
            raise DemoError(f"{child.name} did not end within {timeout_s:g} s", child.tail())
        await asyncio.sleep(POLL_S)
    if child.exit_code() != 0:
        raise DemoError(f"{child.name} ended with {child.exit_code()}", child.tail())


def _die_with(parent: int) -> Callable[[], None]:
    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return prepare
