"""Counts that outlive whoever counts: taken over by the next life, read by another process, bounded, and never torn."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from node_agent import tally
from node_agent.tally import SIZE_BYTES, Tally
from raftmeta.core.errors import RaftmetaError

KILLED = """
import os, signal, sys
from node_agent.tally import Tally
counting = Tally(int(sys.argv[1]))
for number in range(1000):
    counting.add(b"requests", 1.0)
    counting.add(b"one of many %d" % number, 0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def fd() -> Iterator[int]:
    made = tally.make()
    yield made
    os.close(made)


def test_what_a_killed_process_counted_is_there_at_once_and_the_next_one_goes_on(fd: int) -> None:
    watching = Tally(fd)
    for life in (1, 2):
        done = subprocess.run([sys.executable, "-c", KILLED, str(fd)], pass_fds=[fd], timeout=120, check=False)
        assert done.returncode == -signal.SIGKILL
        sums = watching.sums()
        assert sums[b"requests"] == 1000.0 * life
        assert sums[b"one of many 999"] == 0.5 * life
        assert len(sums) == 1001


def test_threads_lose_no_count(fd: int) -> None:
    counting = Tally(fd)

    def work(thread: int) -> None:
        for number in range(500):
            counting.add(b"%d of %d" % (number, thread), 1.0)
            counting.add(b"together", 1.0)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # as often between two of its operations as can be
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    sums = counting.sums()
    assert sums.pop(b"together") == 8 * 500
    assert len(sums) == 8 * 500 and set(sums.values()) == {1.0}


def test_a_name_that_finds_no_room_is_counted_as_lost_and_the_others_go_on(fd: int) -> None:
    counting = Tally(fd)
    counting.add(b"first", 1.0)
    room = SIZE_BYTES // 4096
    for number in range(room + 10):
        counting.add(b"%04096d" % number, 1.0)
    counting.add(b"first", 1.0)
    sums = counting.sums()
    assert sums[b"first"] == 2.0
    assert room - 2 <= len(sums) <= room
    assert counting.lost == room + 11 - len(sums)
    assert Tally(fd).sums() == sums


@pytest.mark.parametrize(("size", "head"), [(SIZE_BYTES - 8, b""), (SIZE_BYTES, b"x" * 8)])
def test_memory_that_is_no_tally_is_refused(size: int, head: bytes) -> None:
    other = os.memfd_create("other")
    try:
        os.truncate(other, size)
        os.pwrite(other, head, 0)
        with pytest.raises(RaftmetaError, match="tally of descriptor"):
            Tally(other)
    finally:
        os.close(other)
