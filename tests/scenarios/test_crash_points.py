"""A member that dies at any call of its disk starts again and has everything that it acknowledged, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from raftmeta.core.errors import RaftmetaError
from raftmeta.durable import File
from tests.scenarios.crash_points import ALL_LOST, CRASHES, REQUIRED, SCRIPTS, die, some_points, table, undisturbed
from tests.support.memory_disk import MemoryDisk

NUMBERS = range(len(SCRIPTS))
NAMES = [script.name for script in SCRIPTS]


def test_the_scripts_make_every_kind_of_call_and_do_what_they_are_for() -> None:
    for script in SCRIPTS:
        _, calls = undisturbed(script)
        assert {call for call, _ in calls} >= set(REQUIRED), f"{script.name}\n{table(calls)}"
    alone, calls = undisturbed(SCRIPTS[0])
    assert alone.victim.told["bootstrapped"]
    assert calls.count(("rename", "segment")) >= 5, "segments are begun"
    assert calls.count(("rename", "snapshot")) >= 3, "snapshots are taken"
    assert calls.count(("unlink", "segment")) >= 2, "and let segments go"
    trio, calls = undisturbed(SCRIPTS[1])
    assert trio.victim.promises.overruled
    assert {"bootstrapped", "snapshot installed", "set aside", "caught up"} <= set(trio.victim.told)
    damaged, calls = undisturbed(SCRIPTS[2])
    assert damaged.victim.told["caught up"] == 2  # once with the cluster
    assert ("rename", "kept segment") in calls


@pytest.mark.parametrize("number", NUMBERS, ids=NAMES)
def test_a_member_that_dies_before_any_kind_of_call_starts_again_with_all_that_it_acknowledged(number: int) -> None:
    """Some calls of each kind; `python -m tests.scenarios.crash_points` tries every call with every way to die."""
    script = SCRIPTS[number]
    _, calls = undisturbed(script)
    chosen = some_points(number, calls, 2)
    assert {calls[point.call] for point in chosen} == set(calls)
    for point in chosen:
        assert die(script, point.call, CRASHES[point.crash]), f"{point} is beyond the end\n{table(calls)}"


# the same with a protection off


class LyingDisk(MemoryDisk):
    """Does not do one kind of call on files whose name contains `name`, and says that it did."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(1)
        self.lie = call, name

    def _sync(self, name: str, file: File) -> None:
        if self._true(name, file.path):
            super()._sync(name, file)

    def sync_directory(self, directory: Path) -> None:
        if self._true("sync_directory", directory):
            super().sync_directory(directory)

    def _true(self, call: str, path: Path) -> bool:
        if call != self.lie[0] or self.lie[1] not in path.name:
            return True
        self._call(call, path)
        return False


def loses(lie: tuple[str, str], after: tuple[str, str]) -> str:
    """What goes wrong first when the power goes just after such a call and nothing un-synced survives, "" if nothing ever does."""
    script = SCRIPTS[0]
    _, calls = undisturbed(script)
    for number in range(1, len(calls)):
        if calls[number - 1] == after:
            try:
                die(script, number, ALL_LOST, LyingDisk(*lie))
            except (AssertionError, RaftmetaError) as loss:
                return str(loss)
    return ""


@pytest.mark.parametrize(
    ("lie", "after", "what"),
    [
        (("fdatasync", "segment-"), ("fdatasync", "segment"), "record 2 was synced, the journal ends at 0"),
        (("fdatasync", "hard-state"), ("fdatasync", "hard"), "expected a list that names segment"),
        (("fsync", "writing-"), ("unlink", "segment"), "expected a header"),
        (("sync_directory", "snapshots"), ("unlink", "segment"), "expected a snapshot that reaches"),
        (("sync_directory", "journal"), ("fdatasync", "hard"), "term 1 went back to 0"),
    ],
)
def test_without_this_sync_some_crash_loses_what_was_acknowledged(lie: tuple[str, str], after: tuple[str, str], what: str) -> None:
    assert what in loses(lie, after)
