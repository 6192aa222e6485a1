"""One check at a time: who holds the lock is told, and a holder that is killed holds it no longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from consistency import lock
from raftmeta.client.config import runtime_dir
from raftmeta.core.errors import RaftmetaError

HOLDER = """
import sys, signal
from pathlib import Path
from consistency import lock
with lock.held(Path(sys.argv[1]), 1_700_000_000_000):
    print("held", flush=True)
    signal.pause()
"""


def test_a_second_one_is_told_who_holds_it_and_since_when(tmp_path: Path) -> None:
    path = tmp_path / "check.lock"
    with (
        lock.held(path, 1_700_000_000_000),
        pytest.raises(lock.CheckRunning, match=f"process {os.getpid()}, since 2023-11-14 22:13:20Z"),
        lock.held(path),
    ):
        raise AssertionError("two hold it")
    with lock.held(path):
        pass


def test_a_holder_that_is_killed_leaves_nothing_that_keeps_others_out(tmp_path: Path) -> None:
    path = tmp_path / "check.lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(lock.CheckRunning, match=f"process {holder.pid}, since 2023"), lock.held(path):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait(10)
    holder.stdout.close()
    with lock.held(path):
        pass


@pytest.mark.parametrize(
    "note", [b"", b"{", b"[1]", b'{"pid": 5}', b'{"pid": "x", "since_ms": 1}', b'{"pid": 5, "since_ms": 1e300}', b"\xff"]
)
def test_what_stands_in_the_file_is_not_relied_on(tmp_path: Path, note: bytes) -> None:
    path = tmp_path / "check.lock"
    with lock.held(path):
        path.write_bytes(note)
        with pytest.raises(lock.CheckRunning, match="it does not say which"), lock.held(path):
            pass


def test_the_lock_is_one_per_user_and_connection(tmp_path: Path) -> None:
    directory = tmp_path / "raftmeta"
    first = lock.path_for(directory, ["http://a", "http://b"])
    assert lock.path_for(directory, ["http://b", "http://a"]) == first
    assert lock.path_for(directory, ["http://a"]) != first
    assert (first.parent, directory.stat().st_mode & 0o777) == (directory, 0o700)


def test_a_directory_that_others_could_have_made_is_refused(tmp_path: Path) -> None:
    open_to_all, elsewhere = tmp_path / "open", tmp_path / "link"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    elsewhere.symlink_to(tmp_path)
    for directory in (open_to_all, elsewhere, tmp_path / "no" / "parent"):
        with pytest.raises(RaftmetaError, match="--lock") as caught:
            lock.path_for(directory, ["http://a"])
        assert caught.value.code == "bad_field"


def test_a_lock_that_cannot_be_opened_is_a_fault_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "other")
    for path in (tmp_path, tmp_path / "no" / "parent", tmp_path / "link"):
        with pytest.raises(RaftmetaError, match="cannot be opened"), lock.held(path):
            pass


def test_shell_and_cron_meet_in_the_same_directory(tmp_path: Path) -> None:
    assert runtime_dir({"XDG_RUNTIME_DIR": "/run/user/7"}, 7) == Path("/run/user/7/raftmeta")
    assert runtime_dir({}, 4_000_000_000) == Path("/tmp/raftmeta-4000000000")


@pytest.mark.parametrize("path", ["/dev/null", "/dev/full"])
def test_what_is_no_file_holds_no_lock(path: str) -> None:
    with pytest.raises(RaftmetaError, match="is no regular file") as caught, lock.held(Path(path)):
        raise AssertionError("it is held")
    assert caught.value.code == "bad_field"


def test_however_the_addresses_of_the_members_are_written_their_lock_is_one(tmp_path: Path) -> None:
    same = (["http://a:80", "https://b:7400"], ["https://b:7400/", "http://A/"], ["http://a/", "HTTP://a", "https://b:7400"])
    assert len({lock.path_for(tmp_path, urls) for urls in same}) == 1
    others = (["http://a"], ["https://a"], ["http://a:81"], ["http://a/x"], ["http://a:x"])
    assert len({lock.path_for(tmp_path, urls) for urls in others}) == len(others)
