"""How long `raftmeta check` takes, as cron would run it: from the start of its process to its end, recorded verdicts included.

    python -m benchmarks check [--runs N] [--only models|fleet]

`models`: 127 deployments of 127 models of 1 MiB on two sides of two nodes each (a node takes 64 deployments at most), over HTTP on
loopback. The members are the real API over a log in memory; nodes are the agent's own code over real arenas (`check_node`). `full` reads
all memory anew, `quiet` takes readings of the last hour. `fleet`: 2,000 nodes that one process plays (`check_fleet`): all equal, then each
different in a tenth of 5,000 tensors, with the most memory that the checker held.

The bars: full 5 s, quiet 1 s, 2,000 nodes 30 s. `in_check` is the part that the command itself measures, without the interpreter's start.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import emit, note, row
from raftmeta.client import Client
from raftmeta.core.state import State
from raftmeta.core.types import RolloutStatus
from tests.support.fake_control_plane import FakeControlPlane
from tests.support.small_version import make_version

MODELS, NODES_OF_SIDE, PER_NODE = 127, 2, 64
TENSORS, TENSOR_BYTES = 16, 64 << 10  # of one model
FLEET, FLEET_TENSORS = 2_000, 5_000
PATIENCE_S = 600.0


class Ran(NamedTuple):
    wall_s: float
    in_check_s: float
    peak_mb: float
    value: dict[str, Any]


def check(url: str, directory: Path, *words: str, expected: int = 0) -> Ran:
    """One run of the command. Raises RuntimeError when it ends in another way than was to be expected."""
    command = [sys.executable, "-m", "raftmeta.cli.main", "check", "--url", url, "--json", "--lock", str(directory / "lock"), *words]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    value = json.loads(output)
    if process.returncode != expected or value["not_recorded"]:
        told = [item for deployment in value["deployments"] for item in (*deployment["findings"], *deployment["reasons"])]
        raise RuntimeError(f"check ended with {process.returncode}: {value.get('error')} {value['not_recorded'][:3]} {told[:3]}")
    return Ran(wall_s, value["duration_s"], used.ru_maxrss * 1024 / 1e6, value)


def models(runs: int) -> None:
    with (
        tempfile.TemporaryDirectory() as root,
        tempfile.TemporaryDirectory(dir="/dev/shm") as arenas,
        served(Path(root), Path(arenas)) as url,
    ):
        for case, words in (("full", ()), ("quiet", ("--max-age", "3600"))):
            done = [check(url, Path(root), *words, "--lag-limit", str(PATIENCE_S * 1000)) for _ in range(runs)]
            assert all(len(ran.value["deployments"]) == MODELS for ran in done)
            _emit(f"{MODELS} models, 2 sides, {case}", done)


@contextmanager
def served(root: Path, arenas: Path) -> Iterator[str]:
    """URL of members whose deployments serve on nodes of this machine."""
    plane = FakeControlPlane()
    plane.start()
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for side in "ab":
            for number in range(NODES_OF_SIDE):
                words = [f"{side}{number}", side, plane.url, str(root), str(arenas), str(os.getpid())]
                nodes.append(subprocess.Popen([sys.executable, "-m", "benchmarks.check_node", *words]))
        began = time.perf_counter()
        asyncio.run(_activate(plane, root / "artifacts"))
        note(f"{MODELS} models serve on {len(nodes)} nodes after {time.perf_counter() - began:.0f} s")
        yield plane.url
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait(60)
        plane.close()


async def _activate(plane: FakeControlPlane, artifacts: Path) -> None:
    async with Client([plane.url], timeout_s=PATIENCE_S) as client:
        for number in range(MODELS):
            name, at = f"m{number:03d}", number // PER_NODE
            tensors = {f"layer.{index:02d}": hashlib.shake_128(f"{name} {index}".encode()).digest(TENSOR_BYTES) for index in range(TENSORS)}
            version = make_version(artifacts / name, "v1", tensors)
            await client.publish(name, "v1", version.manifest)
            sides = {side: {"zone": zone, "nodes": [f"{zone}{at}"]} for side, zone in (("primary", "a"), ("standby", "b"))}
            await client.declare_deployment(name, {"model": name, **sides})
            rollout = (await client.activate(name, "v1"))["rollout_id"]
            await asyncio.to_thread(plane.until, partial(_is_over, rollout), name, PATIENCE_S)
            assert plane.state.rollouts[rollout].status == RolloutStatus.DONE, plane.state.rollouts[rollout]


def _is_over(rollout_id: str, state: State) -> bool:
    return state.rollouts[rollout_id].status != RolloutStatus.RUNNING


def fleet(runs: int) -> None:
    for kind, expected in (("equal", 0), ("different", 1)):
        with tempfile.TemporaryDirectory() as root, played(kind) as url:
            done = [check(url, Path(root), expected=expected) for _ in range(runs)]
            assert sum(item["nodes_seen"] for item in done[0].value["deployments"]) == FLEET
            _emit(f"{FLEET} nodes, {kind}", done)


@contextmanager
def played(kind: str) -> Iterator[str]:
    words = [sys.executable, "-m", "benchmarks.check_fleet", str(FLEET), str(FLEET_TENSORS), kind]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        try:
            yield process.stdout.readline().decode().strip()
        finally:
            process.stdin.close()
            process.wait(60)


def _emit(case: str, done: list[Ran]) -> None:
    emit(row("check", case, "s", statistics.median(ran.wall_s for ran in done)))
    emit(row("check", f"{case}, in_check", "s", statistics.median(ran.in_check_s for ran in done)))
    emit(row("check", f"{case}, peak of the checker", "MB", max(ran.peak_mb for ran in done)))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks check")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", choices=("models", "fleet"))
    given = parser.parse_args(arguments)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8_192)), hard))
    if given.only != "fleet":
        models(given.runs)
    if given.only != "models":
        fleet(given.runs)
    return 0
