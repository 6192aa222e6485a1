"""A follower that needs a snapshot gets one in the end: while writes go on, over links that break, and when the leader's file is bad."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raftmeta.log.exchange import ExchangeSettings
from raftmeta.log.messages import AnyMessage, SnapshotChunk
from raftmeta.log.passing import QUIET_S
from raftmeta.log.peers import Connected, Disconnected, Received
from raftmeta.log.snapshots import SnapshotMeta
from raftmeta.log.transfers import PIN_S, Transfers
from tests.support.memory_disk import MemoryDisk
from tests.support.scripted_cluster import Members
from tests.support.scripted_member import ScriptedMember
from tests.support.trio import Trio

SNAPSHOTS = Path("/data/snapshots")
OFTEN = ExchangeSettings(entries=20, keep_entries=5, keep_bytes=0, chunk_bytes=64)  # a transfer lasts longer than several snapshots


class World(Members):
    """Three members of which one was away until only a snapshot helps it; what is sent to it is counted."""

    def __init__(self, exchange: ExchangeSettings, writes: int = 140) -> None:
        super().__init__(("m1", "m2", "m3"), exchange=exchange, segment_bytes=40 << 10)
        self.chunks: list[SnapshotChunk] = []
        self.lost: Callable[[AnyMessage], bool] = lambda message: False
        self.start()
        self.write("a")
        self.converge()
        self.first = self.leader()
        self.late = next(member for member in self.members.values() if member is not self.first)
        self.isolate(self.late)
        for number in range(writes):
            self.write(f"x{number}")
        self.heal(self.late)

    def deliver(self, sender: str, receiver: str, message: AnyMessage) -> None:
        if isinstance(message, SnapshotChunk):
            self.chunks.append(message)
        if not self.lost(message):
            super().deliver(sender, receiver, message)

    def under_writes(self, writes: int, until: Callable[[], bool] = lambda: False) -> bool:
        """One write for about four chunks."""
        for number in range(writes):
            self.propose(self.first, f"y{len(self.proposed)} {number}")
            self.run(0.008)
            if until():
                return True
        return until()

    def is_near(self) -> bool:
        assert self.late.replica is not None and self.first.replica is not None
        return self.late.replica.engine.applied_index >= self.first.replica.engine.applied_index - 20

    def snapshots(self, member: ScriptedMember) -> list[str]:
        return [name for name in member.disk.listdir(SNAPSHOTS) if name.startswith("snapshot-")]

    def newest(self) -> Path:
        return SNAPSHOTS / max(self.snapshots(self.first))


def test_a_transfer_that_takes_longer_than_snapshots_live_ends_while_writes_go_on() -> None:
    world = World(OFTEN)
    taken: set[str] = set()

    def done() -> bool:
        taken.update(world.snapshots(world.first))
        return world.is_near()

    assert world.under_writes(1500, done)
    assert len(taken) >= 5 and len({chunk.index for chunk in world.chunks}) == 1, "it was one transfer, past several snapshots"
    assert world.late.told["snapshot installed"] == 1


def test_what_a_transfer_holds_goes_when_it_moves_no_more() -> None:
    world = World(OFTEN)
    world.under_writes(10)
    world.lost = lambda message: isinstance(message, SnapshotChunk)
    journal = world.first.journal
    assert journal is not None
    world.under_writes(150)
    held = world.chunks[-1].index
    file = next(name for name in world.snapshots(world.first) if int(name.split("-")[1]) == held)
    assert len(world.snapshots(world.first)) == 3 and journal.first_index <= held + 1
    for _ in range(8):
        world.run(PIN_S / 7)
    world.under_writes(60)
    assert file not in world.snapshots(world.first) and journal.first_index > held + 1
    world.lost = lambda message: False
    world.run(20.0)
    assert world.is_near()


def test_the_journal_that_a_transfer_holds_is_bounded() -> None:
    exchange = ExchangeSettings(entries=20, keep_entries=5, keep_bytes=0, chunk_bytes=64, held_bytes=20 << 10)
    world = World(exchange)
    journal = world.first.journal
    assert journal is not None
    sizes = []
    for _ in range(40):
        world.under_writes(10)
        sizes.append(journal.bytes)
    assert max(sizes) < 90 << 10
    assert len({chunk.index for chunk in world.chunks}) > 1, "it had to begin again"
    world.run(20.0)
    assert world.is_near()


def test_a_transfer_goes_on_where_it_stopped_when_the_link_was_lost() -> None:
    world = World(OFTEN)
    world.under_writes(40)
    through = max(chunk.offset for chunk in world.chunks)
    assert through > 64 * 20
    first, late = world.first, world.late
    late.inbox.append(Disconnected(first.name))
    first.inbox.append(Disconnected(late.name))
    world.under_writes(60)  # three snapshots later
    world.chunks.clear()
    late.inbox.append(Connected(first.name, first.incarnation))
    first.inbox.append(Connected(late.name, late.incarnation))
    assert world.under_writes(1500, world.is_near)
    assert len({chunk.index for chunk in world.chunks}) == 1
    assert sorted(chunk.offset for chunk in world.chunks)[1] >= through


def flipped(disk: MemoryDisk, path: Path) -> None:
    disk.flip(path, len(disk.contents(path)) // 2, 1)


def removed(disk: MemoryDisk, path: Path) -> None:
    disk.unlink(path)


def cut_off(disk: MemoryDisk, path: Path) -> None:
    disk.cut(path, len(disk.contents(path)) // 2)


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
@pytest.mark.parametrize("damage", [flipped, removed, cut_off])
def test_a_leader_whose_newest_snapshot_is_damaged_says_so_and_takes_another(
    damage: Callable[[MemoryDisk, Path], None], chunk_bytes: int
) -> None:
    world = World(ExchangeSettings(entries=10, keep_entries=0, keep_bytes=0, chunk_bytes=chunk_bytes))
    damage(world.first.disk, world.newest())
    assert world.run(20.0, world.is_near)
    assert world.first.told["alarm snapshot_unusable"] == 1
    assert world.late.told["alarm snapshot_unusable"] == (damage is flipped)
    assert len({chunk.sha256 for chunk in world.chunks if chunk.offset == 0}) <= 2, "nobody is sent the damaged one twice"
    world.run(QUIET_S + 1.0)
    assert world.first.told["alarm over snapshot_unusable"] == 1
    world.converge()
    world.check()


def test_nothing_that_was_written_is_lost_when_the_leader_restarts_after_its_newest_snapshot_was_replaced() -> None:
    world = World(ExchangeSettings(entries=10, keep_entries=0, keep_bytes=0))
    flipped(world.first.disk, world.newest())
    world.run(20.0, world.is_near)
    world.restart(world.first)
    world.converge()
    world.check()
    assert world.first.told["set aside"] == 0


def test_a_follower_that_refuses_a_sound_snapshot_says_so_and_gets_it_again() -> None:
    world = World(ExchangeSettings(entries=10, keep_entries=0, keep_bytes=0))
    spoilt: list[SnapshotChunk] = []
    sound = world.lost

    def spoil(message: AnyMessage) -> bool:
        if isinstance(message, SnapshotChunk) and len(spoilt) < 3:
            spoilt.append(message)
            bad = bytearray(message.data)
            bad[len(bad) // 2] ^= 1
            fields = {name: getattr(message, name) for name in message.__struct_fields__}
            world.late.inbox.append(Received(world.first.name, SnapshotChunk(**{**fields, "data": bytes(bad)})))
            return True
        return sound(message)

    world.lost = spoil
    assert world.run(20.0, world.is_near)
    assert len(spoilt) == 3 and world.late.told["alarm snapshot_unusable"] == 3
    assert world.first.told["alarm snapshot_unusable"] == 0, "its file is sound"


def test_an_early_answer_that_begins_again_makes_nobody_doubt_a_file() -> None:
    world = World(OFTEN)
    world.under_writes(5)
    exchange = world.first.replica._exchange  # type: ignore[union-attr]
    exchange.refused(world.late.name)
    assert exchange._doubted is None


def meta(index: int) -> SnapshotMeta:
    return SnapshotMeta(index, 1, b"", 100, bytes(32))


def test_a_chunk_that_is_sent_again_moves_nothing() -> None:
    transfers = Transfers()
    transfers.begin("m2", meta(5), 0.0)
    transfers.sent("m2", 10, 20.0)
    transfers.sent("m2", 10, 45.0)
    assert transfers.held(20.0 + PIN_S) == [meta(5)]
    assert transfers.held(20.0 + PIN_S + 0.1) == []
    transfers.sent("m2", 20, 60.0)
    assert transfers.held(61.0) == [meta(5)]
    transfers.drop(meta(5))
    assert transfers.held(61.0) == [] and transfers.of("m2") is None


def test_a_snapshot_that_found_no_room_worries_nobody_once_the_follower_has_caught_up_without_it() -> None:
    trio = Trio()
    leader, follower = trio.leader(), trio.follower()
    trio.write(leader, "v1")
    follower.disk.capacity_bytes = follower.disk.used_bytes() + (4 << 20)
    applied = follower.replica.engine.applied_index
    chunk = SnapshotChunk(leader.replica.engine.term, applied + 2, 1, 1 << 38, bytes(32), 0, b"x", 1)
    follower.inbox.append(Received(leader.name, chunk))
    trio.run(2.0)
    assert "alarm disk_full" in follower.told and "alarm over disk_full" not in follower.told
    for number in range(3):
        trio.write(leader, f"w{number}")
    trio.run(3.0)
    assert "alarm over disk_full" in follower.told
