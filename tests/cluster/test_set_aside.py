"""Real members: one with a damaged journal, and one whose state was changed behind its back, come back with what the others hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from raftmeta import config
from raftmeta.cli.init import InitOptions, run
from raftmeta.core.commands import Publish
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import Outcome
from raftmeta.log.quarantine import KEPT_NAME
from raftmeta.member import Member
from tests.support.commands import publication
from tests.support.real_cluster import RealCluster

WAIT_S = 30.0


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_a_member_with_a_damaged_journal_takes_everything_from_the_others(tmp_path: Path) -> None:
    with RealCluster(tmp_path) as cluster:
        cluster.wait_ready()
        leader = cluster.leader()
        for number in range(3):
            assert cluster.publish(leader, f"1.0.{number}").status_code == 201
        victim = next(zone for zone in cluster.servers if zone != leader)
        data = next(path.parent for path in cluster.directory.glob(f"**/{victim}/**/hard-state"))
        until(lambda: marked(data), "the mark was not written")
        cluster.servers[victim].kill()
        segment = next(data.glob("segment-*"))
        with segment.open("r+b") as file:
            file.seek(3 * 4096 + 40)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
        cluster.servers[victim].start()
        cluster.wait_ready()
        shown = {zone: cluster.get(zone, "/v1/cluster").json()["state_hash"] for zone in cluster.servers}
        assert len(set(shown.values())) == 1
        assert cluster.get(victim, "/v1/models/m/versions/1.0.2?consistency=stale").status_code == 200
        assert (data.parent / KEPT_NAME / "record").exists()
        assert list((data.parent / KEPT_NAME / "journal").glob("segment-*"))


def marked(journal: Path) -> bool:
    """Whether the newest mark of the only segment speaks of its records, and not of its start."""
    blocks = next(journal.glob("segment-*")).read_bytes()[4096 : 3 * 4096]
    return blocks[:4096].rstrip(b"\0") != blocks[4096:].rstrip(b"\0")


@pytest.fixture
def members(tmp_path: Path) -> Iterator[list[Member]]:
    """Three members in this process, so that a test can reach into one."""
    made = run(tmp_path / "cluster", ["a", "b", "c"], InitOptions(base_port=0))
    found = [Member.open(config.load(file)) for file in made.servers]
    try:
        for member in found:
            member.start()
        yield found
    finally:
        for member in found:
            member.stop()


def write(member: Member, label: str) -> Outcome:
    """Through this member, again under the same key until somebody leads."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return member.log.propose(publish(label), f"key-{label}", "admin", 5.0).result(10.0)
        except RaftmetaError as refused:
            assert time.monotonic() < deadline, refused


def publish(label: str) -> Publish:
    return publication("m", label)


@pytest.mark.parametrize("who", ["leader", "follower"])
def test_a_member_with_another_state_is_set_aside_while_its_process_stays(members: list[Member], who: str) -> None:
    write(members[0], "1.0.0")
    until(lambda: len({member.state.revision for member in members}) == 1, "not everybody applied the first version")
    victim = next(member for member in members if (member.log.status().role == "leader") == (who == "leader"))
    state = victim.state
    victim._replica.state = msgspec.structs.replace(state, hash_sum=state.hash_sum ^ (1 << 200))
    first_log = victim.log
    write(members[0], "1.0.1")
    until(lambda: victim.log is not first_log, "the member did not begin again")
    until(lambda: not victim.unsound, "the member did not catch up")
    write(victim, "1.0.2")
    until(lambda: len({member.state.state_hash for member in members}) == 1, "the states still differ")
    assert not victim.failed.is_set()
    assert all(check.ok for check in victim.checks()), victim.checks()


def test_a_repaired_member_serves_watches_from_what_it_lists_and_hands_out_the_next_event(members: list[Member]) -> None:
    write(members[0], "1.0.0")
    until(lambda: len({member.state.revision for member in members}) == 1, "not everybody applied the first version")
    victim = next(member for member in members if member.log.status().role != "leader")
    other = next(member for member in members if member is not victim)
    state, first_log = victim.state, victim.log
    victim._replica.state = msgspec.structs.replace(state, hash_sum=state.hash_sum ^ (1 << 200))
    before = victim.watch.subscribe(state.revision)
    write(other, "1.0.1")
    until(lambda: victim.log is not first_log and not victim.unsound, "the member did not come back")
    with before, pytest.raises(RaftmetaError, match="compacted"):
        before.take()
    until(lambda: victim.state.revision == other.state.revision, "the member did not come as far as the others")
    assert victim.watch.revision == victim.state.revision
    with victim.watch.subscribe(victim.state.revision) as repaired, other.watch.subscribe(other.state.revision) as healthy:
        assert not repaired.take() + healthy.take()
        write(other, "1.0.2")
        until(lambda: victim.watch.revision == other.watch.revision == state.revision + 2, "the write did not arrive")
        assert [[change.revision for change, _ in watch.take()] for watch in (repaired, healthy)] == [[state.revision + 2]] * 2
