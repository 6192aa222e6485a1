"""A directory in shared memory for the length of a test, and processes that end with it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def shm_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="raftmeta-test-") as directory:
        yield Path(directory)


@contextmanager
def python_process(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """An interpreter that runs `code`; it says what it has to say on its standard output, and is killed at the end."""
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line the process says; fails when it ended instead."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the process ended with status {process.poll()} before it said anything"
    return line.strip()
