"""What a node's clients notice when its processes end, and how soon an earlier version is back.

A client asks all the time while control, then a worker, is killed: what it saw as lost, and its longest wait. Then everything is killed at
once, the weight files are moved away, and the agent starts again from what its arena holds; its peer is a start without that memory. What
Python and its libraries need to be imported stands apart. A roll-back is timed from the command to the first answer of the other version;
its peer makes the module from the files again, in a process that has everything loaded. Arguments: trials (20), workers (2), rate (20).
Exit status 1 when a bar is missed: nothing lost, and a roll-back within 100 ms.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoModel

from benchmarks.asker import LOST, WRONG, Seen, asking
from benchmarks.encoders import TEXTS, label_of
from benchmarks.harness import emit, note, percentile, row, seconds
from benchmarks.nodes import DEPLOYMENT, ServingNode, serving_node
from tests.support.agent_process import PATIENCE_S

BENCH = "restart"
ROLL_BACK_MS = 100.0
PAUSE_S = 0.5  # between a settled node and the next kill, so that waits do not overlap
STARTS = 5  # of a whole agent, each of which imports its libraries anew
IMPORTS = "import torch, transformers, numba, uvicorn"
BODY = {"inputs": [{"name": "text", "shape": [len(TEXTS)], "datatype": "BYTES", "data": list(TEXTS)}]}


def main(arguments: list[str]) -> int:
    given = [int(argument) for argument in arguments]
    trials, workers, rate = (*given, *(20, 2, 20)[len(given) :])
    with serving_node(2, workers=workers) as node:
        node.activate(2)
        held = _killed(node, "control", trials, rate)
        held = _killed(node, "worker", trials, rate) and held
        held = _roll_back(node, trials) and held
        _everything_killed(node)
    note("holds: nothing lost, no wrong answer, roll-back in time" if held else "a bar is missed")
    return 0 if held else 1


def _killed(node: ServingNode, role: str, trials: int, rate: int) -> bool:
    """Kill one process of a role again and again under load. Whether nothing was lost."""
    back: list[float] = []
    with asking(node.agent.url, DEPLOYMENT, rate, node.expected, node.root) as asker:
        quiet_from = time.monotonic()
        time.sleep(5.0)
        kills_from = time.monotonic()
        for _ in range(trials):
            back.append(seconds(lambda: _kill_and_wait(node, role)))
            time.sleep(PAUSE_S)
        until = time.monotonic()
    seen = asker.result
    quiet = seen.between(quiet_from, kills_from).max() * 1000
    case = f"{role} killed {trials} times"
    emit(row(BENCH, f"{case}: longest answer", "ms", seen.between(kills_from, until).max() * 1000, ("without kills", quiet)))
    emit(row(BENCH, f"{case}: back after, median", "ms", statistics.median(back) * 1000))
    return _nothing_lost(seen, case)


def _nothing_lost(seen: Seen, case: str) -> bool:
    lost, wrong = seen.count(LOST), seen.count(WRONG)
    note(f"{case}: {len(seen.due_s)} requests, {lost} lost, {wrong} wrong {sorted(set(seen.label[seen.outcome == LOST]))}")
    return not lost and not wrong


def _kill_and_wait(node: ServingNode, role: str) -> None:
    """Until control has noticed, and then says again that every worker serves."""
    node.agent.kill(role)
    node.agent.until(lambda: not _whole(node), f"the loss of {role} is noticed")
    node.agent.until(lambda: _whole(node), f"{role} is back")


def _whole(node: ServingNode) -> bool:
    found = node.agent.status().get("deployments", {}).get(DEPLOYMENT, {})
    return bool(found.get("ready"))


def _roll_back(node: ServingNode, trials: int) -> bool:
    """There and back. Whether the median is in time."""
    ours: list[float] = []
    theirs: list[float] = []
    with httpx.Client(base_url=node.agent.url, timeout=PATIENCE_S, trust_env=False) as http:
        for _ in range(trials):
            before = node.plane.state.deployments[DEPLOYMENT].version
            node.agent.until_settled(before)
            time.sleep(PAUSE_S)
            ours.append(_until_another_answers(node, http, before) * 1000)
            theirs.append(seconds(lambda: _from_files(node.directories[0])) * 1000)
    case = f"roll-back, command to first answer, {trials} trials"
    emit(row(BENCH, f"{case}, median", "ms", statistics.median(ours), ("from_pretrained", statistics.median(theirs))))
    emit(row(BENCH, f"{case}, p90", "ms", percentile(ours, 0.9)))
    return statistics.median(ours) <= ROLL_BACK_MS


def _until_another_answers(node: ServingNode, http: httpx.Client, before: str) -> float:
    begin = 0.0

    async def order(client: Any) -> Any:
        nonlocal begin
        await client.cluster()  # connected: an operator's command starts with that
        begin = time.perf_counter()
        return await client.rollback(DEPLOYMENT)

    rollout = node.call(order)["rollout_id"]
    while http.post(f"/v2/models/{DEPLOYMENT}/infer", json=BODY).headers.get("x-raftmeta-version") == before:
        pass
    took_s = time.perf_counter() - begin
    node.finish(rollout)
    return took_s


def _from_files(directory: Path) -> Any:
    """What an engine without a second slot does to have the version again, after it has let go of the first."""
    return AutoModel.from_pretrained(directory, local_files_only=True)


def _everything_killed(node: ServingNode) -> None:
    label = label_of(1)
    if node.plane.state.deployments[DEPLOYMENT].version != label:
        node.activate(1)
    node.agent.until_settled(label)
    imports = statistics.median(
        seconds(lambda: subprocess.run([sys.executable, "-c", IMPORTS], check=True, capture_output=True)) for _ in range(3)
    )
    warm = [_start_after_kill(node) for _ in range(STARTS)]
    cold = [_start_after_kill(node, forget=lambda: _remove_files(node.arena_dir)) for _ in range(STARTS)]
    emit(row(BENCH, "imports of Python and its libraries", "s", imports))
    case = f"everything killed: start to first answer, {STARTS} trials, median"
    emit(row(BENCH, case, "s", statistics.median(warm), ("without the arena", statistics.median(cold))))
    emit(row(BENCH, f"{case}, less one import", "s", statistics.median(warm) - imports))


def _start_after_kill(node: ServingNode, forget: Callable[[], object] | None = None) -> float:
    """Seconds from the start to the first answer. The weight files are away, unless there is something to forget."""
    blobs, away = node.agent.store / "blobs" / "sha256", node.agent.store / "away"
    os.kill(node.agent.pid, signal.SIGKILL)  # the kernel takes the children along
    node.agent.close()
    if forget is None:
        blobs.rename(away)
    else:
        forget()
    begin = time.perf_counter()
    node.agent.start()
    with httpx.Client(base_url=node.agent.url, timeout=PATIENCE_S, trust_env=False) as http:
        node.agent.until(lambda: http.post(f"/v2/models/{DEPLOYMENT}/infer", json=BODY).status_code == 200, "an answer")
    took_s = time.perf_counter() - begin
    node.agent.until_settled(label_of(1))
    if forget is None:
        blobs.rmdir()  # made anew by the start, and empty
        away.rename(blobs)
    return took_s


def _remove_files(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_file():
            path.unlink()
