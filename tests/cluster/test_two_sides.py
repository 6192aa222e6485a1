"""Two sides of real processes: what a check finds in their memory and live probes in their answers, and a fail-over under requests."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node_agent import names
from tests.support.agent_process import PATIENCE_S
from tests.support.shm import shm_directory
from tests.support.two_sides import DEPLOYMENT, TwoSides

pytestmark = pytest.mark.cluster

LAGS = ("--lag-limit", "600000")  # how long a busy machine takes to switch is not looked at here


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoSides]:
    with shm_directory() as arena_dir:
        # Without the scrub, which would mend a flipped bit as soon as a check has read it, between two of its questions.
        made = TwoSides(tmp_path_factory.mktemp("sides"), arena_dir, verify_max_age_s=0, scrub_interval_s=0)
        try:
            made.start()
            made.serve("1.0.0")
            yield made
        finally:
            made.close()


def check(sides: TwoSides, *words: str, status: int = 0) -> dict[str, Any]:
    """The verdict of the deployment."""
    done = sides.command("check", "--json", *LAGS, *words)
    assert done.returncode == status, (done.stdout, done.stderr)
    (found,) = json.loads(done.stdout)["deployments"]
    return found  # type: ignore[no-any-return]


def recorded(sides: TwoSides) -> str:
    found = sides.plane.state.verdicts.get(DEPLOYMENT)
    return "" if found is None else found.verdict


SIGN = 3  # byte of a little-endian F32 that has it


def flip(sides: TwoSides, tensor_bytes: bytes, byte: int = 0) -> None:
    """The highest bit of a byte in the standby's slot, where these bytes are."""
    path = sides.arena_dir / names.arena(sides.standby.store, "n2", DEPLOYMENT)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        at = memory.find(tensor_bytes)
        assert at >= 0 and memory.find(tensor_bytes, at + 1) < 0
        memory[at + byte] ^= 0x80


def test_equal_sides_are_consistent_by_vector_by_digest_and_by_what_was_read_before(sides: TwoSides) -> None:
    now = check(sides, "--deep")
    assert (now["verdict"], now["nodes_seen"], recorded(sides)) == ("consistent", 2, "consistent")
    assert [node["sha256_equal"] for node in now["nodes"]] == [True, True]
    quiet = check(sides, "--max-age", "3600")
    assert quiet["verdict"] == "consistent"
    assert quiet["oldest_proof_ms"] > now["oldest_proof_ms"], "it rests on the reading before"


def test_a_check_that_is_killed_or_whose_nodes_and_members_are_records_nothing_wrong(sides: TwoSides, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "raftmeta.cli.main", "check", "--json", *LAGS, "--url", sides.plane.url, "--timeout", "2"]
    for number, kill in enumerate(("checker", "checker", "control", "front", "control", "members")):
        environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            process.wait(0.8 + 0.2 * number)  # somewhere in the middle, or not: what is recorded must hold either way
        except subprocess.TimeoutExpired:
            pass
        if kill == "checker":
            process.kill()
        elif kill == "members":
            sides.plane.stop()
        else:
            sides.standby.kill(kill)
        output, _ = process.communicate(timeout=PATIENCE_S)
        if kill == "members":
            sides.plane.start()
        assert process.returncode in (0, 2, -signal.SIGKILL), output
        assert recorded(sides) in ("consistent", "incomplete")
        sides.standby.until_settled("1.0.0")
    assert check(sides)["verdict"] == "consistent"


def test_equal_sides_answer_alike_and_a_fail_over_loses_no_request(sides: TwoSides, tmp_path: Path) -> None:
    alike = sides.command("live", DEPLOYMENT, "--for", "2", "--rate", "40", "--json")
    found = json.loads(alike.stdout)
    assert (alike.returncode, found["verdict"], found["within_tolerance"]) == (0, "consistent", 1.0), (alike.stdout, alike.stderr)
    assert found["samples"]["compared"] >= 40 and found["pairs"] == {"covered": 1, "of": 1}

    report = tmp_path / "drill.json"
    drill = sides.command("drill", "side-failover", DEPLOYMENT, "--steady", "1", "--report", str(report))
    assert drill.returncode == 0, (drill.stdout, drill.stderr)
    made = json.loads(report.read_bytes())
    assert made["holds"] and made["requests"]["lost"] == 0 and made["requests"]["asked"] > 20
    assert [(move["to"], list(move["old_side_refused_ms"])) for move in made["failovers"]] == [("standby", ["n1"]), ("primary", ["n2"])]
    assert sides.plane.state.deployments[DEPLOYMENT].serving_side == "primary"


def test_a_fail_over_without_a_side_to_take_over_is_refused_and_changes_nothing(sides: TwoSides) -> None:
    order = sides.plane.state.deployments[DEPLOYMENT].order_revision
    os.kill(sides.standby.child("control"), signal.SIGSTOP)
    try:
        drill = sides.command("drill", "side-failover", DEPLOYMENT, "--steady", "1", "--node-timeout", "2")
        assert drill.returncode == 1 and "failover_refused" in drill.stderr, (drill.stdout, drill.stderr)
    finally:
        os.kill(sides.standby.child("control"), signal.SIGCONT)
    assert sides.plane.state.deployments[DEPLOYMENT].order_revision == order
    sides.standby.until_settled("1.0.0")


def drilled_until_moved(sides: TwoSides, tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    """A drill that has let the other side serve."""
    order = sides.plane.state.deployments[DEPLOYMENT].order_revision
    command = [sys.executable, "-m", "raftmeta.cli.main", "drill", "side-failover", DEPLOYMENT, "--url", sides.plane.url, *words]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    until = time.monotonic() + PATIENCE_S
    while sides.plane.state.deployments[DEPLOYMENT].order_revision == order and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.02)
    return process


def test_a_drill_that_is_ended_by_a_signal_goes_back(sides: TwoSides, tmp_path: Path) -> None:
    process = drilled_until_moved(sides, tmp_path, "--steady", "3")
    process.send_signal(signal.SIGTERM)
    said, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1 and "it was told to stop; the primary side serves" in said, (said, errors)
    assert sides.plane.state.deployments[DEPLOYMENT].serving_side == "primary"


def test_a_drill_whose_way_back_is_refused_says_who_serves_and_how_to_go_back(sides: TwoSides, tmp_path: Path) -> None:
    process = drilled_until_moved(sides, tmp_path, "--steady", "3", "--node-timeout", "1")
    os.kill(sides.primary.child("control"), signal.SIGSTOP)
    try:
        said, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        os.kill(sides.primary.child("control"), signal.SIGCONT)
    assert process.returncode == 1 and "THE STANDBY SIDE SERVES NOW" in said, (said, errors)
    assert f"raftmeta failover {DEPLOYMENT} --to primary --url {sides.plane.url}" in errors
    sides.primary.until_settled("1.0.0")
    check(sides)
    back = sides.command("failover", DEPLOYMENT, "--to", "primary")
    assert back.returncode == 0 and sides.plane.state.deployments[DEPLOYMENT].serving_side == "primary", (back.stdout, back.stderr)


def test_one_flipped_bit_is_found_and_no_earlier_reading_hides_it(sides: TwoSides) -> None:
    weights = next((sides.primary.root.parent / "artifacts" / "v1").glob("*.safetensors")).read_bytes()
    head = int.from_bytes(weights[:8], "little")
    layout = {name: item for name, item in json.loads(weights[8 : 8 + head]).items() if name != "__metadata__"}
    name, item = max(layout.items(), key=lambda pair: pair[1]["data_offsets"][1] - pair[1]["data_offsets"][0])
    begin, end = (8 + head + offset for offset in item["data_offsets"])
    flip(sides, weights[begin:end])
    try:
        found = check(sides, "--deep", status=1)
        told = {(finding["code"], finding["node"], finding["tensor"]) for finding in found["findings"]}
        assert told == {("sides", "", ""), ("block", "n2", name), ("sha256", "n2", name)}
        assert recorded(sides) == "diverged"
        assert check(sides, "--max-age", "3600", status=1)["verdict"] == "diverged"
    finally:
        damaged = bytes([weights[begin] ^ 0x80]) + weights[begin + 1 : end]
        flip(sides, damaged)
    assert check(sides)["verdict"] == "consistent"


def test_a_weight_of_the_other_sign_shows_in_the_answers_and_is_recorded(sides: TwoSides) -> None:
    weights = next((sides.primary.root.parent / "artifacts" / "v1").glob("*.safetensors")).read_bytes()
    head = int.from_bytes(weights[:8], "little")
    begin, end = (8 + head + at for at in json.loads(weights[8 : 8 + head])["first.weight"]["data_offsets"])
    flip(sides, weights[begin:end], SIGN)
    try:
        live = sides.command("live", DEPLOYMENT, "--for", "2", "--rate", "40", "--json")
        found = json.loads(live.stdout)
        assert (live.returncode, found["verdict"]) == (1, "diverged"), (live.stdout, live.stderr)
        assert found["beyond"] and {side["node"] for side in found["kept"][0]["sides"]} == {"n1", "n2"}
        assert [action.partition("; ")[0] for action in found["actions"]] == [
            "n1: its memory holds 1.0.0 as it was published",
            "n2: its memory is not 1.0.0 as it was published",
        ]
        assert recorded(sides) == "diverged"
    finally:
        flip(sides, weights[begin : begin + SIGN] + bytes([weights[begin + SIGN] ^ 0x80]) + weights[begin + SIGN + 1 : end], SIGN)
    assert check(sides)["verdict"] == "consistent"
