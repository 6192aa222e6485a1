"""Who owns a file in shared memory: a process named so that a reused pid is another process.

Reads /proc only. A process that has ended but was not reaped counts as ended: it can no longer touch memory.
"""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import msgspec


class ProcessId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pid: int
    start_ticks: int  # clock ticks after boot; with the pid unique within one boot

    def __str__(self) -> str:
        return f"process {self.pid} (started {self.start_ticks} ticks after boot)"


def this_process() -> ProcessId:
    pid = os.getpid()
    started = start_ticks(pid)
    assert started is not None, "/proc does not show this process"
    return ProcessId(pid, started)


def is_running(process: ProcessId) -> bool:
    return start_ticks(process.pid) == process.start_ticks


def kill(process: ProcessId) -> None:
    """SIGKILL, to this very process and no other that got its pid."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if is_running(process):  # the descriptor holds on to whoever had the pid before this look
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, None when there is no such process or its last thread has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the name before it may hold spaces and brackets
    state, threads, started = fields[0], int(fields[17]), int(fields[19])
    ended = state in (b"Z", b"X") and threads <= 1  # a first thread that has ended says nothing about the others
    return None if ended else started


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def has_ended(pidfd: int) -> bool:
    """A pidfd becomes readable when its process ends, reaped or not."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def pid_of(pidfd: int) -> int:
    """The pid behind a pidfd, -1 once the process was reaped. Raises ValueError when the descriptor is no pidfd."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    raise ValueError(f"descriptor {pidfd} is no pidfd")
