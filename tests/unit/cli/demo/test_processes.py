"""Child processes are ended whatever they do, seen when they fall, and what they said is shown."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from raftmeta.cli.demo.errors import DemoError
from raftmeta.cli.demo.processes import Children, run_to_end

SLEEP = ["-c", "import time; print('up', flush=True); time.sleep(60)"]
STUBBORN = ["-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"]
WITH_CHILD = ["-c", "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"]


def wait_for(log: Path, timeout_s: float = 20.0) -> str:
    deadline = time.monotonic() + timeout_s
    while not log.exists() or not log.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return log.read_text()


def gone(pid: int, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_leaving_the_block_ends_every_process_also_one_that_ignores_the_request(tmp_path: Path) -> None:
    with Children(tmp_path, {}) as children:
        started = [children.start("plain", SLEEP), children.start("stubborn", STUBBORN)]
        for child in started:
            wait_for(child.log)
        children.stop_all(patience_s=0.3)
        assert all(child.exit_code() is not None for child in started)
        assert [child.exit_code() for child in started] == [-signal.SIGTERM, -signal.SIGKILL]


def test_what_a_child_started_itself_is_ended_with_it(tmp_path: Path) -> None:
    with Children(tmp_path, {}) as children:
        grandchild = int(wait_for(children.start("parent", WITH_CHILD).log))
    assert gone(grandchild)


def test_a_process_that_falls_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    with Children(tmp_path, {"WORD": "because"}) as children:
        fine = children.start("fine", SLEEP)
        worker = children.start("worker", ["-c", "pass"], ends=True)
        assert gone(worker.pid) and children.fallen() is None
        fallen = children.start("bad", ["-c", "import os, sys; print('\\x1b[2J' + os.environ['WORD']); sys.exit(7)"])
        assert gone(fallen.pid)
        found = children.fallen()
        assert found is fallen and found.exit_code() == 7 and found.tail() == "?[2Jbecause"
        children.forget(fallen)
        assert children.fallen() is None and fine.exit_code() is None


def test_a_killed_process_is_gone_at_once_and_its_name_can_be_used_again(tmp_path: Path) -> None:
    with Children(tmp_path, {}) as children:
        first = children.start("member", SLEEP)
        wait_for(first.log)
        children.forget(first)
        first.kill()
        assert first.exit_code() == -signal.SIGKILL
        again = children.start("member", ["-c", "print('second', flush=True)"], ends=True)
        asyncio.run(run_to_end(again, 20))
        assert again.tail() == "up\nsecond"


def test_a_process_that_should_end_with_success_and_does_not_stops_the_story(tmp_path: Path) -> None:
    with Children(tmp_path, {}) as children:
        with pytest.raises(DemoError, match="ended with 3") as raised:
            asyncio.run(run_to_end(children.start("a", ["-c", "print('why'); raise SystemExit(3)"], ends=True), 20))
        assert raised.value.log == "why"
        with pytest.raises(DemoError, match="did not end"):
            asyncio.run(run_to_end(children.start("b", SLEEP, ends=True), 0.1))


def test_children_do_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from raftmeta.cli.demo.processes import Children\n"
        f"with Children(Path({str(tmp_path)!r}) / 'inner', {{}}) as c:\n"
        " print(c.start('x', ['-c', 'import time; time.sleep(60)']).pid, flush=True); time.sleep(60)\n"
    )
    with Children(tmp_path, {}) as children:
        parent = children.start("parent", ["-c", code])
        grandchild = int(wait_for(parent.log))
        os.kill(parent.pid, signal.SIGKILL)
        assert gone(grandchild)
