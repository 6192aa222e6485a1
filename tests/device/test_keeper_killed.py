"""Real processes of a keeper and of those who use its memory, killed at any moment."""

from __future__ import annotations

import mmap
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from node_agent.device.keeper_client import KeeperClient
from node_agent.device.process import has_ended
from node_agent.refusal import Refusal
from tests.support.shm import line_of, python_process

pytestmark = pytest.mark.device
PAGE = os.sysconf("SC_PAGE_SIZE")
WRITER = """
import mmap, os, sys
from pathlib import Path
from node_agent.device.keeper_client import KeeperClient
held = KeeperClient(Path(sys.argv[1])).hold("arena", 1 << 20)
memory = mmap.mmap(held.descriptor, held.size_bytes)
print("created" if held.created else bytes(memory[:7]).decode(), flush=True)
memory[:7] = b"written"
print("wrote", flush=True)
sys.stdin.read()
"""


@contextmanager
def keeper(path: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "node_agent.device.keeper_main", "--socket", str(path), "--limit-bytes", str(1 << 22), *more]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        await_keeper(path)
        yield process
    finally:
        process.kill()
        process.wait()


def await_keeper(path: Path) -> None:
    """Until it answers; the file name may be that of one that was killed."""
    deadline = time.monotonic() + 30
    while True:
        try:
            KeeperClient(path).list()
        except Refusal:
            assert time.monotonic() < deadline, "the keeper did not answer within 30 s"
            time.sleep(0.05)
        else:
            return


def test_memory_outlives_a_writer_that_was_killed_and_the_next_one_finds_it(tmp_path: Path) -> None:
    with keeper(tmp_path / "k.sock"):
        with python_process(WRITER, str(tmp_path / "k.sock")) as first:
            assert [line_of(first), line_of(first)] == ["created", "wrote"]
            first.send_signal(signal.SIGKILL)
            first.wait()
        with python_process(WRITER, str(tmp_path / "k.sock")) as second:
            assert line_of(second) == "written"
        assert [item.name for item in KeeperClient(tmp_path / "k.sock").list().held] == ["arena"]


def test_who_maps_memory_keeps_it_when_the_keeper_is_killed_and_the_next_keeper_knows_nothing_of_it(tmp_path: Path) -> None:
    client = KeeperClient(tmp_path / "k.sock")
    with keeper(tmp_path / "k.sock") as first:
        held = client.hold("arena", PAGE)
        with mmap.mmap(held.descriptor, PAGE) as mapped:
            os.close(held.descriptor)
            mapped[:5] = b"bytes"
            first.kill()
            first.wait()
            with pytest.raises(Refusal, match="keeper_unavailable"):
                client.open("arena")
            with keeper(tmp_path / "k.sock"):
                assert client.open("arena") is None
            assert mapped[:5] == b"bytes"


def test_a_keeper_that_is_told_to_end_takes_its_socket_along(tmp_path: Path) -> None:
    with keeper(tmp_path / "k.sock") as process:
        process.terminate()
        assert process.wait(30) == 0
        assert not (tmp_path / "k.sock").exists()


def test_a_second_keeper_says_why_it_does_not_start(tmp_path: Path) -> None:
    with keeper(tmp_path / "k.sock"):
        command = [sys.executable, "-m", "node_agent.device.keeper_main", "--socket", str(tmp_path / "k.sock"), "--limit-bytes", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1 and "keeper_in_use" in done.stderr


@pytest.mark.parametrize("outlives", [False, True])
def test_a_keeper_ends_with_its_parent_unless_it_has_none(tmp_path: Path, outlives: bool) -> None:
    code = """
import os, subprocess, sys
more = [] if sys.argv[2] == "True" else ["--parent", str(os.getpid())]
command = [sys.executable, "-m", "node_agent.device.keeper_main", "--socket", sys.argv[1], "--limit-bytes", "100000", *more]
print(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid, flush=True)
sys.stdin.read()
"""
    with python_process(code, str(tmp_path / "k.sock"), str(outlives)) as parent:
        pid = int(line_of(parent))
        await_keeper(tmp_path / "k.sock")
        pidfd = os.pidfd_open(pid)
        parent.kill()
        parent.wait()
    if outlives:
        assert KeeperClient(tmp_path / "k.sock").list().held == ()
        assert not has_ended(pidfd)
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    assert poller.poll(30_000), f"{pid} still runs"
    os.close(pidfd)


def test_a_keeper_for_a_device_that_is_not_there_does_not_start_and_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "node_agent.device.keeper_main", "--socket", str(tmp_path / "k.sock"), "--limit-bytes", "1"]
    done = subprocess.run([*command, "--device", "cuda:99"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "no_device" in done.stderr and not (tmp_path / "k.sock").exists()
