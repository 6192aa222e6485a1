"""A slow disk is named in the log of its member: at once, and then once a minute however many syncs are slow."""

from __future__ import annotations

import time
from pathlib import Path

import structlog

from raftmeta.config import ServerConfig
from raftmeta.log.syncs import SAY_S, SLOW_S, Syncs
from raftmeta.member import Member
from tests.support.trio import Trio


class Heard:
    def __init__(self) -> None:
        self.words: list[tuple[int, float]] = []

    def slow_disk(self, count: int, longest_s: float) -> None:
        self.words.append((count, longest_s))


def test_syncs_that_are_fast_or_have_nothing_to_do_leave_no_word() -> None:
    heard = Heard()
    syncs = Syncs(heard)
    for seconds in (0.0, 0.001, SLOW_S - 0.001, 0.0):
        syncs.took(seconds, 50.0)
    assert heard.words == []
    assert syncs.last_s == SLOW_S - 0.001, "the last one that had something to do"


def test_the_first_slow_sync_is_told_at_once_and_those_that_follow_once_a_minute_with_their_number_and_the_longest() -> None:
    heard = Heard()
    syncs = Syncs(heard)
    syncs.took(0.15, 100.0)
    assert heard.words == [(1, 0.15)]
    for second in range(1, 60):
        syncs.took(0.4 if second == 7 else 0.15, 100.0 + second)
    assert heard.words == [(1, 0.15)]
    syncs.took(0.2, 100.0 + SAY_S)
    assert heard.words == [(1, 0.15), (60, 0.4)]
    syncs.took(0.15, 100.0 + 3 * SAY_S)
    assert heard.words[2:] == [(1, 0.15)], "what was told is not told again"


def test_a_member_whose_sync_took_long_is_told_and_the_others_are_not() -> None:
    trio = Trio()
    leader = trio.leader()
    leader.disk.on_call = lambda call, path: time.sleep(SLOW_S * 1.1) if call == "fdatasync" else None
    assert trio.write(leader, "v1").code == "ok"
    assert [name for name, box in trio.boxes.items() if "slow disk" in box.told] == [leader.name]
    assert leader.replica.sync_s > SLOW_S


class Lines:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def warning(self, line: str) -> None:
        self.seen.append(line)

    info = error = critical = warning


def test_the_line_of_a_slow_disk_names_its_directory_and_leaves_the_member_ready(tmp_path: Path) -> None:
    lines = Lines()
    structlog.configure(logger_factory=lambda *_: lines)
    member = Member.open(ServerConfig.development(tmp_path / "data"))
    try:
        member._replica._syncs.took(0.15, 1.0)
        (line,) = [line for line in lines.seen if "slow_disk" in line]
        assert str(tmp_path / "data") in line and "150" in line
        assert all(check.ok for check in member.checks())
    finally:
        member.stop()
        structlog.reset_defaults()
