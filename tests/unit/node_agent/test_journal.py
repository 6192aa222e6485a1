from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from node_agent import failure
from node_agent.device.port import SlotRecord, SlotState
from node_agent.journal import ChangeRecord, DeploymentRecord, Follower, Journal, read
from node_agent.plan import Order, Target
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import SideName, StageCounters

PIN = Target("encoder", "1.0.0", "a" * 64, "b" * 64)
RECORD = DeploymentRecord("search", "encoder", SideName.PRIMARY, "x.arena", "x.control", fence=Order(1, 9), obeyed=PIN, pin=PIN)


def test_what_was_put_is_there_after_a_restart(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "n1")
    change = ChangeRecord("r-1", StageCounters(bytes_total=5, lag_ms=3), failure.make("no_headroom", "plan", "too small"))
    journal.put(DeploymentRecord("search", "encoder", SideName.STANDBY, "x.arena", "x.control", fence=Order(2, 7), pin=PIN, change=change))
    again = Journal(tmp_path, "n1").deployment("search")
    assert again == journal.deployment("search")
    assert again is not None and (again.fence, again.pin, again.change) == (Order(2, 7), PIN, change)


def test_putting_the_same_again_writes_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "n1")
    journal.put(RECORD)
    before = (tmp_path / "node.state").stat().st_ino
    journal.put(RECORD)
    assert (tmp_path / "node.state").stat().st_ino == before


def test_what_was_noted_reaches_the_disk_with_the_next_change_and_never_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "n1")
    journal.put(RECORD)
    noted = msgspec.structs.replace(RECORD, change=ChangeRecord("r-1"))
    journal.note("search", lambda record: msgspec.structs.replace(record, change=ChangeRecord("r-1")))
    assert journal.deployment("search") == noted
    assert Journal(tmp_path, "n1").deployment("search") == RECORD
    journal.update("search", lambda record: msgspec.structs.replace(record, change=ChangeRecord("r-1")))  # what is known already
    assert Journal(tmp_path, "n1").deployment("search") == noted


def test_a_dropped_deployment_is_gone(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "n1")
    journal.put(RECORD)
    journal.drop("search")
    assert Journal(tmp_path, "n1").record.deployments == {}


def test_a_damaged_record_stops_the_process_instead_of_starting_empty(tmp_path: Path) -> None:
    Journal(tmp_path, "n1").put(RECORD)
    path = tmp_path / "node.state"
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    with pytest.raises(RaftmetaError) as damaged:
        Journal(tmp_path, "n1")
    assert damaged.value.code == "integrity"
    path.write_bytes(b"")
    with pytest.raises(RaftmetaError):
        read(tmp_path)


def test_the_record_of_another_node_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path, "n1").put(RECORD)
    with pytest.raises(RaftmetaError, match="belongs to node 'n1', this is 'n2'"):
        Journal(tmp_path, "n2")


def test_a_follower_sees_every_replacement_and_keeps_its_copy_otherwise(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    assert follower.deployments() == {}
    journal = Journal(tmp_path, "n1")
    journal.put(RECORD)
    first = follower.deployments()
    assert first["search"] == RECORD
    assert follower.deployments() is first
    journal.drop("search")
    assert follower.deployments() == {}


def test_what_builds_before_the_scrub_do_not_know_is_written_only_where_it_says_something() -> None:
    assert "damage" not in msgspec.msgpack.decode(msgspec.msgpack.encode(RECORD))
    assert "damage" in msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.structs.replace(RECORD, damage="x")))
    slot = msgspec.msgpack.decode(msgspec.msgpack.encode(SlotRecord(SlotState.VERIFIED, "1.0.0")))
    assert slot == {"state": "verified", "version": "1.0.0"}
