"""What one member's disk may do to it: the process dies at any call of many writes, the disk is full over a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from raftmeta.durable import File
from tests.scenarios.killed_alone import ALONE, WRITES, write_and_die
from tests.support.memory_disk import MemoryDisk
from tests.support.scripted_cluster import Members
from tests.support.trio import Trio, publish


def test_a_member_alone_that_dies_at_any_call_of_300_writes_starts_again_with_every_acknowledged_one() -> None:
    """At every seventh call, which meets each kind, for a write makes four or five; the module itself tries all of them."""
    deaths = write_and_die(WRITES, every=7)
    assert deaths.calls > 2 * WRITES and deaths.tried == deaths.calls // 7


ALL = ("m1", "m2", "m3")


class ForgetfulDisk(MemoryDisk):
    """Says of every sync of a journal file that it was done."""

    def fdatasync(self, file: File) -> None:
        self._call("fdatasync", file.path)


def test_without_the_sync_such_a_death_loses_what_was_acknowledged() -> None:
    with pytest.raises(AssertionError, match=r"was acknowledged and is lost|no leader"):
        write_and_die(10, every=1, disk=ForgetfulDisk(1))


def test_a_full_disk_refuses_writes_only_over_a_restart_too_and_takes_them_again_when_space_is_freed() -> None:
    world = Members(ALONE)
    disk = world.victim.disk
    world.start()
    world.write(*(f"v{number}" for number in range(5)))
    disk.capacity_bytes = disk.used_bytes()
    kept = fill(world)
    world.restart(world.victim)
    assert not empty_final_files(disk)
    assert refused(world, "after-restart")
    leader = world.leader()  # checks what was acknowledged
    assert leader.replica is not None
    seen: list[str] = []
    leader.replica.read(1.0, lambda code, index: seen.append(code))
    assert world.run(2.0, lambda: bool(seen)) and seen == ["ok"], "it reads"
    assert kept <= set(world.acknowledged)
    disk.capacity_bytes = None
    world.run(3.0)
    world.write("freed")
    world.write(*(label.removeprefix("key-") for label in sorted(world.proposed - set(world.acknowledged))))
    world.converge()
    world.check()
    assert leader.told["alarm disk_full"] and leader.told["alarm over disk_full"]


def test_three_on_full_disks_elect_a_leader_after_a_restart_of_all_and_read_and_take_writes_again_when_space_is_freed() -> None:
    trio = Trio(segment_bytes=32 << 10, capacities=dict.fromkeys(ALL, 320 << 10))
    codes = [write(trio, "v0")]
    while codes[-1] == "ok":
        assert len(codes) < 900, "no disk was full"
        codes.append(write(trio, f"v{len(codes)}"))
    for _ in range(200):  # elections take what commands were refused, then the reserve, and only they do
        assert trio.leader().replica.transfer(trio.follower().name)
        trio.run(0.3)
    assert all(len(segments(box.disk)) > 1 for box in trio.boxes.values()), "the reserve was begun"
    for turn in range(3):
        disks = {name: trio.stop(name) for name in ALL}
        for name in ALL:
            assert not empty_final_files(disks[name])
            trio.boot(name, disks[name])
        leader = trio.leader()
        seen: list[str] = []
        leader.replica.read(1.0, lambda code, index: seen.append(code))  # noqa: B023 - read in this turn only
        assert trio.run(2.0, lambda: bool(seen)) and seen == ["ok"]  # noqa: B023
        assert len(trio.labels(leader.name)) == codes.count("ok")
        assert write(trio, f"turn-{turn}") == "disk_full"
    for box in trio.boxes.values():
        box.disk.capacity_bytes = None
    trio.rest(3.0)
    assert write(trio, "freed") == "ok"


def segments(disk: MemoryDisk) -> list[Path]:
    return [path for path in disk.files() if path.name.startswith("segment-")]


def write(trio: Trio, label: str) -> str:
    results = trio.propose(trio.leader(), publish(label), f"key-{label}")
    assert trio.run(5.0, lambda: bool(results))
    return results[0].code


def fill(world: Members) -> set[str]:
    """Write until the disk takes no more. The keys that were acknowledged."""
    for number in range(200):
        if refused(world, f"f{number}"):
            return set(world.acknowledged)
    raise AssertionError("the disk was never full")


def refused(world: Members, label: str) -> bool:
    """Whether there was no room for this write."""
    leader = world.leader()
    results = world.propose(leader, label)
    assert world.run(5.0, lambda: bool(results))
    assert results[0].code in ("ok", "disk_full"), results
    return results[0].code == "disk_full"


def empty_final_files(disk: MemoryDisk) -> list[Path]:
    """Without those under a temporary name, of something that was under way."""
    return [
        path for path, data in disk.files().items() if not data and not path.name.startswith((".", "writing")) and path.suffix != ".tmp"
    ]
