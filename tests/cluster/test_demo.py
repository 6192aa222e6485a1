"""The demo as a user runs it: every claim holds, the report has its shape, and nothing is left behind, also when it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raftmeta.cli.demo import places
from raftmeta.cli.demo.command import find_source

pytestmark = pytest.mark.cluster
DEMO = (sys.executable, "-m", "raftmeta.cli.main", "demo")


def processes_of(directory: Path) -> list[int]:
    """Processes whose command line names the directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(directory).encode() in words and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def wait_until_none(directory: Path, timeout_s: float) -> list[int]:
    deadline = time.monotonic() + timeout_s
    while (left := processes_of(directory)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def test_every_claim_of_the_demo_holds_and_nothing_is_left_running(tmp_path: Path) -> None:
    work, report = tmp_path / "work", tmp_path / "demo.json"
    words = [*DEMO, "--dir", str(work), "--report", str(report), "--steady-s", "3"]
    model = find_source(None)
    before = sorted(model.rglob("*"))
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "every claim held" in done.stdout
    assert processes_of(work) == []
    assert sorted(model.rglob("*")) == before, "the model's directory is not the demo's"
    made = json.loads(report.read_text())
    assert made["requests"]["lost"] == 0 and made["requests"]["wrong_version_label"] == 0 and made["requests"]["sent"] > 100
    assert made["failover"]["missing_after"] == 0 and made["failover"]["acknowledged"] >= 50
    assert [check["verdict"] for check in made["consistency"]] == ["consistent", "consistent"]
    assert [(item["to"], item["kind"]) for item in made["activate"]] == [
        ("v1", "activate"), ("v2", "activate"), ("v3", "activate"), ("v2", "rollback"),
    ]  # fmt: skip
    assert all(claim["held"] for claim in made["claims"])


def test_a_killed_demo_takes_its_processes_along(tmp_path: Path) -> None:
    work = tmp_path / "work"
    with subprocess.Popen([*DEMO, "--dir", str(work)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as demo:
        deadline = time.monotonic() + 60
        while not (work / "logs" / "node-a.log").exists() and demo.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(processes_of(work)) >= 3
        demo.send_signal(signal.SIGKILL)
    assert wait_until_none(work, 30) == []
    places.sweep(places.MEMORY)
    assert not list(places.MEMORY.glob(f"{places.PREFIX}{demo.pid}-*"))


def test_a_model_directory_without_a_config_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = subprocess.run([*DEMO, "--model", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3 and "holds no config.json" in done.stderr and done.stdout == ""
