"""Members that are stopped and started in any order, and disks from earlier times."""

from __future__ import annotations

from itertools import permutations

import pytest

from raftmeta.log.configuration import Configuration
from raftmeta.log.guard import Rules
from raftmeta.log.setup import LEADER
from tests.support.memory_disk import MemoryDisk
from tests.support.trio import Trio

NAMES = ("m1", "m2", "m3")
ORDERS = tuple(permutations(NAMES))
ELECTS_WITHIN_S = 10.0


def stop(trio: Trio, name: str) -> MemoryDisk:
    """End the process in good order, as SIGTERM does."""
    box = trio.boxes[name]
    box.replica.stop()
    box.journal.close()
    return trio.stop(name)


@pytest.mark.parametrize("stopped", ORDERS, ids="-".join)
def test_members_that_were_stopped_in_any_order_elect_a_leader_with_any_two_started_in_any_order(stopped: tuple[str, ...]) -> None:
    trio = Trio()
    trio.write(trio.leader(), "v1")
    configuration = trio.leader().replica.engine.configuration
    disks = {}
    for name in stopped:
        disks[name] = stop(trio, name)
        trio.run(0.7)  # long enough for those that are left to elect another leader now and then
    for first, second, third in ORDERS:
        again = {name: disk.clone() for name, disk in disks.items()}
        trio.boxes.clear()
        trio.boot(first, again[first])
        trio.run(0.5)
        assert not trio._leaders(), "one of three leads nobody"
        trio.boot(second, again[second])
        assert trio.run(ELECTS_WITHIN_S, lambda: bool(trio._leaders())), (stopped, first, second)
        assert trio.labels(trio.leader().name) == {"v1"}
        assert trio.write(trio.leader(), f"with-{first}-{second}").code == "ok"
        for name in (first, second):
            assert trio.boxes[name].replica.engine.configuration == configuration, "stopping or starting edited the members"
        late = trio.boot(third, again[third])
        trio.run(2.0)
        assert late.replica.state.state_hash == trio.leader().replica.state.state_hash


def without(configuration: Configuration, name: str) -> Configuration:
    return Configuration(tuple(member for member in configuration.members if member.id != name))


@pytest.mark.parametrize("on", [True, False], ids=["rule on", "rule off"])
@pytest.mark.parametrize("disk_is", ["of the time before its removal", "of its removal"])
def test_a_removed_member_that_comes_back_on_an_old_disk_moves_nothing_and_leads_nobody(disk_is: str, on: bool) -> None:
    """Even where it is linked, which the transport of a member that knows of the removal refuses."""
    trio = Trio(rules=Rules(pre_vote=on))
    trio.write(trio.leader(), "v1")
    leader, removed = trio.leader(), trio.follower().name
    trio.run(0.3)
    old = trio.boxes[removed].disk.clone()
    before = leader.replica.engine.configuration
    assert leader.replica.engine.change_configuration(without(before, removed)) is None
    trio.run(0.5)
    disk = trio.stop(removed)
    trio.write(leader, "v2")
    term, members = leader.replica.engine.term, leader.replica.engine.configuration
    assert removed not in members.ids
    zombie = trio.boot(removed, old if disk_is == "of the time before its removal" else disk)
    trio.run(5.0)
    if on:
        assert trio.leader() is leader and leader.replica.engine.term == term
    else:
        assert leader.replica.engine.term > term, "it forces elections on them"
    assert leader.replica.engine.configuration == members
    trio.stop(leader.name)  # one of two is left, and with the removed one it is no majority
    trio.run(10.0)
    assert not trio._leaders()
    assert "v2" not in trio.labels(removed) and zombie.replica.engine.role != LEADER
