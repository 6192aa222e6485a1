"""Tools of the machine that some faults need: strace, to slow and fail the syncs of a running member, and a C compiler, for its wall clock.

Each is tried before the run, not just looked for: a container may have strace and still forbid it to attach.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from tests.cluster.nemesis.plan import Kind

SHIM_SOURCE = Path(__file__).with_name("clock_shim.c")
ATTACH_S = 10.0
COMPILE_S = 60.0
POLL_S = 0.02
HOUR_S = 3600
SYNCS = "fdatasync,fsync"
INJECTED = "(INJECTED)"
SYNC_CALL = "sync("  # of a line that shows one; "fdatasync resumed" is its second half


class ToolFailed(Exception):
    """A tool did not do on this machine, at this moment, what it is there for."""


async def unable_to_trace(folder: Path) -> dict[Kind, str]:
    """The faults that need strace, when it cannot attach and inject here."""
    why = await _trace_obstacle(folder)
    return dict.fromkeys((Kind.SLOW_SYNC, Kind.FAILED_SYNC), why) if why else {}


async def _trace_obstacle(folder: Path) -> str:
    if shutil.which("strace") is None:
        return "strace is not installed"
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    try:
        async with tampered(victim.pid, "error=EIO", folder / "probe.strace"):
            return ""
    except ToolFailed as refused:
        return f"strace cannot attach to a process here: {refused}"
    finally:
        victim.kill()
        victim.wait()


@contextlib.asynccontextmanager
async def tampered(pid: int, how: str, output: Path) -> AsyncIterator[None]:
    """While inside, syncs of the process and all its threads are tampered with as `strace -e inject` says. Raises ToolFailed."""
    command = ["strace", "-qq", "-f", "-o", str(output), "-e", f"trace={SYNCS}", "-e", f"inject={SYNCS}:{how}", "-p", str(pid)]
    tracer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        await asyncio.to_thread(_wait_attached, tracer, pid)
        yield
    finally:
        await asyncio.to_thread(_detach, tracer)


def _detach(tracer: subprocess.Popen[bytes]) -> None:
    tracer.send_signal(signal.SIGINT)
    try:
        tracer.communicate(timeout=ATTACH_S)
    except subprocess.TimeoutExpired:
        tracer.kill()
        tracer.communicate()


def _wait_attached(tracer: subprocess.Popen[bytes], pid: int) -> None:
    """Until every thread of the process is traced."""
    deadline = time.monotonic() + ATTACH_S
    while not all(_traced(task) for task in _tasks(pid)):
        if tracer.poll() is not None:
            assert tracer.stderr is not None
            raise ToolFailed(tracer.stderr.read().decode(errors="replace").strip()[:300] or "strace ended")
        if time.monotonic() > deadline:
            raise ToolFailed(f"not attached after {ATTACH_S} s")
        time.sleep(POLL_S)


def _tasks(pid: int) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(f"/proc/{pid}/task")]
    except FileNotFoundError as gone:
        raise ToolFailed(f"process {pid} is gone") from gone


def _traced(task: Path) -> bool:
    try:
        return "TracerPid:\t0\n" not in (task / "status").read_text()
    except OSError:
        return True  # the thread ended


def clock_shim(folder: Path) -> Path | str:
    """The library that shifts wall clocks, compiled and tried; or why there is none."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return "no C compiler is installed to build the clock's shim with"
    library, offset = folder / "clock_shim.so", folder / "clock-probe"
    built = subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SHIM_SOURCE)], capture_output=True, text=True, timeout=COMPILE_S
    )
    if built.returncode:
        return f"the clock's shim does not compile: {built.stderr.strip()[:300]}"
    offset.write_bytes(struct.pack("=q", 0))
    command = [sys.executable, "-c", "import time\nprint(time.time())\ninput()\nprint(time.time())"]
    env = os.environ | {"LD_PRELOAD": str(library), "NEMESIS_CLOCK": str(offset), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        assert process.stdout is not None
        before = process.stdout.readline()
        with offset.open("r+b") as file:
            file.write(struct.pack("=q", -HOUR_S))
        after, _ = process.communicate("\n", timeout=COMPILE_S)
    try:
        jumped = float(after) - float(before)
    except ValueError:
        return f"the clock's shim is not taken by this Python: {(before + after).strip()[:300]}"
    return library if -HOUR_S <= jumped < -HOUR_S / 2 else f"the clock's shim moves the clock by {jumped:.0f} s instead of {-HOUR_S} s"
