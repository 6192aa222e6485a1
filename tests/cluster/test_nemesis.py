"""A short run of the nemesis in each place, the same program that `make soak` runs for long; and that it is not blind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from tests.cluster.nemesis.faults import Event
from tests.cluster.nemesis.places import inside, obstacle
from tests.cluster.nemesis.plan import ORDINARY, Kind, longest_hold_s, steps
from tests.cluster.nemesis.verdict import judge, longest_gaps, missing_writes, opening
from tests.support.linearizability import Operation

pytestmark = pytest.mark.cluster

BOUND_S = 480.0  # a machine with much else to do; idle, the longest of these takes a minute
END_S = 30.0
BITES = {
    Kind.FULL_DISK: r"\w, [1-9]\d* refused with 507, then \w led",
    Kind.FAILED_SYNC: r"\w ended with 1 after [1-9]",
    Kind.SLOW_SYNC: r"\w, [1-9]\d* syncs",
}
LINKS = "kill,pause,isolate,bridge,one-way,rough-links"


def nemesis(*arguments: str) -> tuple[int, str]:
    """Exit status and output of a run."""
    command = [sys.executable, "-u", "-m", "tests.cluster.nemesis", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=BOUND_S)
    except BaseException:
        os.kill(process.pid, signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()  # in namespaces everything in them ends with it
        raise
    return process.returncode, output.decode(errors="replace")


def made(output: str) -> dict[str, int]:
    """How often each kind happened, from the table at the end."""
    return {kind: int(times) for kind, times in re.findall(r"^([a-z-]+) +(\d+) +[\d.]+ s$", output, re.MULTILINE)}


def expect_held(status: int, output: str, kinds: Sequence[str]) -> None:
    print(output)
    assert status == 0, output
    undone = re.findall(r"^NOT DONE HERE: ([a-z-]+): (.*)$", output, re.MULTILINE)
    for kind, why in undone:
        warnings.warn(f"NOT CHECKED HERE: {kind}: {why}", stacklevel=2)
    assert {kind for kind, times in made(output).items() if times} == set(kinds) - {kind for kind, _ in undone}, output
    assert "accepted: by revision, and" in output


def test_three_members_in_namespaces_keep_their_promises_under_every_fault() -> None:
    if why := obstacle():
        pytest.skip(f"NOT CHECKED HERE: network namespaces: {why}")
    status, output = nemesis("--minutes", "0.6", "--seed", "27", "--place", "namespaces")
    expect_held(status, output, ORDINARY)
    for kind, bite in BITES.items():
        assert kind not in made(output) or re.search(rf" {kind} +{bite}", output), f"{kind} did not bite"


def test_three_members_behind_a_link_proxy_keep_their_promises_when_links_fail() -> None:
    status, output = nemesis("--minutes", "0.2", "--seed", "22", "--place", "loopback", "--faults", LINKS)
    expect_held(status, output, LINKS.split(","))


def test_a_run_in_which_a_majority_forgets_what_it_acknowledged_fails(tmp_path: Path) -> None:
    status, output = nemesis("--minutes", "0.02", "--seed", "22", "--faults", "rollback", "--folder", str(tmp_path / "run"))
    assert (tmp_path / "run" / "history.jsonl").stat().st_size > 1000
    shutil.rmtree(tmp_path / "run")  # some hundred megabytes
    assert status == 1, output
    assert "VIOLATED: by revision: " in output, output
    assert "VIOLATED: search of r" in output, output
    assert re.search(r"^acknowledged writes: \d+, missing: [1-9]", output, re.MULTILINE), output


def test_a_cut_silences_its_direction_and_no_other_until_it_is_healed() -> None:
    if why := obstacle():
        pytest.skip(f"NOT CHECKED HERE: network namespaces: {why}")
    done = subprocess.run(inside("tests.cluster.nemesis.hearing", []), capture_output=True, text=True, timeout=BOUND_S)
    assert done.stdout.splitlines() == [
        "open: ab ac ba bc ca cb",
        "a to b cut: ac ba bc ca cb",
        "also b to a and c to a: ac bc cb",
        "healed: ab ac ba bc ca cb",
    ], done.stderr


# ---------------------------------------------------------------------- the parts that judge


def wrote(value: str, at: float, revision: int, key: str = "r0-1") -> Operation:
    return Operation(1, key, "write", value, at, at + 0.5 if revision else None, revision)


def read(value: str, at: float, revision: int, key: str = "r0-1") -> Operation:
    return Operation(2, key, "read", value, at, at + 0.5, revision)


GOOD = [wrote("v1", 0, 1), read("v1", 1, 1), wrote("v2", 2, 2), read("v2", 3, 2), wrote("v3", 4, 0), read("v2", 5, 2), read("v3", 6, 4)]


def test_a_good_history_is_accepted_by_both_checkers() -> None:
    assert judge(GOOD).violations == ()
    assert judge(GOOD).searched == 1


@pytest.mark.parametrize(
    "place, value",
    [(3, "v1"), (3, ""), (6, "v1"), (6, "v9")],
    ids=["stale", "absent again", "older at the end", "never written"],
)
def test_a_history_with_one_false_read_is_refused_by_both_checkers(place: int, value: str) -> None:
    false = [*GOOD]
    false[place] = msgspec.structs.replace(GOOD[place], value=value)
    assert [fault.partition(":")[0] for fault in judge(false).violations] == ["by revision", "search of r0-1"]


def test_the_opening_of_a_good_history_is_good_wherever_it_is_cut_and_that_of_a_bad_one_bad_once_the_fault_is_in_it() -> None:
    for count in range(1, len(GOOD) + 1):
        assert judge(opening(GOOD, count)).violations == ()
    slow = msgspec.structs.replace(read("v1", 0, 1), returned=9.0)  # of a value that is written after the cut
    assert judge(opening([slow, wrote("v1", 5, 1)], 1)).violations == ()
    false = [*GOOD[:3], read("v1", 3, 1), *GOOD[4:]]
    assert judge(opening(false, 5)).violations


def test_a_register_that_shows_less_than_was_acknowledged_is_missed_and_one_with_an_unanswered_write_is_not() -> None:
    assert missing_writes(GOOD, {"a": {"r0-1": "v2"}, "b": {"r0-1": "v3"}}) == []
    (missing,) = missing_writes(GOOD, {"a": {"r0-1": "v2"}, "b": {"r0-1": "v1"}})
    assert missing == "r0-1 on b shows 'v1', but 'v2' was acknowledged at revision 2"


def test_a_gap_belongs_to_the_fault_in_whose_time_it_was() -> None:
    events = [Event(Kind.KILL, 10.0, 12.0, "", True), Event(Kind.PAUSE, 20.0, 21.0, "", True)]
    acknowledged = [wrote(f"v{number}", at - 0.5, number + 1) for number, at in enumerate([9.0, 16.0, 19.0, 20.5, 29.0])]
    assert longest_gaps(acknowledged, events, 30.0) == {Kind.KILL: 6.0, Kind.PAUSE: 8.5}


def test_a_seed_gives_its_schedule_again_with_every_kind_once_before_any_comes_twice() -> None:
    first, again, other = (list(islice(steps(seed, 60.0, ORDINARY), 2 * len(ORDINARY))) for seed in (1, 1, 2))
    assert first == again != other
    for deck in (first[: len(ORDINARY)], first[len(ORDINARY) :]):
        assert sorted(step.kind for step in deck) == sorted(ORDINARY)
    assert all(1.0 <= step.hold_s <= longest_hold_s(60.0) == 4.0 for step in first)
    assert longest_hold_s(3600.0) == 30.0
