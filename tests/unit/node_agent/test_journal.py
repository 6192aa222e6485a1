from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import node_agent.journal
from node_agent import failure
from node_agent.device.port import SlotRecord, SlotState
from node_agent.journal import ChangeRecord, DeploymentRecord, Follower, Journal, read
from node_agent.plan import Order, Target
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import SideName, StageCounters
from raftmeta.durable import DiskFull, OsDisk

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


def damage(directory: Path) -> None:
    path = directory / "node.state"
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_file(disk: object, path: Path, data: bytes) -> None:
        raise DiskFull(f"no room for {path}")

    monkeypatch.setattr(node_agent.journal, "write_file", write_file)


def test_what_is_kept_is_in_force_on_a_full_disk_and_written_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, "n1")
    journal.put(RECORD)
    with monkeypatch.context() as patch:
        full(patch)
        journal.keep("search", lambda record: msgspec.structs.replace(record, damage="block 3", behind=True))
        with pytest.raises(DiskFull):
            journal.update("search", lambda record: msgspec.structs.replace(record, fence=Order(2, 1)))
        journal.mend()
    kept = msgspec.structs.replace(RECORD, damage="block 3", behind=True)
    assert journal.deployment("search") == kept, "and the fence is not what no disk has"
    assert Journal(tmp_path, "n1").deployment("search") == RECORD
    journal.mend()
    assert Journal(tmp_path, "n1").deployment("search") == kept
    before = (tmp_path / "node.state").stat().st_ino
    journal.mend()
    assert (tmp_path / "node.state").stat().st_ino == before


def test_what_is_kept_is_durable_at_once_where_the_disk_takes_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "n1")
    journal.put(RECORD)
    journal.keep("search", lambda record: msgspec.structs.replace(record, behind=True))
    assert Journal(tmp_path, "n1").deployment("search") == msgspec.structs.replace(RECORD, behind=True)


@pytest.mark.parametrize("spoil", ["damaged", "gone", "of another process"])
def test_a_file_that_is_not_what_was_written_is_written_again_by_who_knows_it(tmp_path: Path, spoil: str) -> None:
    journal = Journal(tmp_path, "n1")
    journal.put(RECORD)
    journal.note("search", lambda record: msgspec.structs.replace(record, lag_ms=5))
    path = tmp_path / "node.state"
    if spoil == "damaged":
        damage(tmp_path)
    elif spoil == "gone":
        path.unlink()
    else:
        journal_of_another = Journal(tmp_path, "n1")
        journal_of_another.drop("search")
    journal.mend()
    assert Journal(tmp_path, "n1").deployment("search") == journal.deployment("search")


def test_a_follower_goes_by_what_it_read_last_until_the_file_is_whole_again(tmp_path: Path) -> None:
    journal, follower = Journal(tmp_path, "n1"), Follower(tmp_path)
    journal.put(RECORD)
    assert follower.deployments() == {"search": RECORD}
    damage(tmp_path)
    assert follower.deployments() == {"search": RECORD}
    with pytest.raises(RaftmetaError, match="SHA-256"):
        Follower(tmp_path).deployments()
    (tmp_path / "node.state").unlink()
    assert follower.deployments() == {"search": RECORD}
    journal.drop("search")
    assert follower.deployments() == {}


def test_what_was_set_aside_lets_one_more_record_onto_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, "n1")
    journal.put(RECORD)
    reserve, write_file = tmp_path / "node.state.reserve", node_agent.journal.write_file

    def write_on_full_disk(disk: OsDisk, path: Path, data: bytes) -> None:
        if reserve.exists():
            raise DiskFull(f"no room for {path}")
        write_file(disk, path, data)

    assert reserve.stat().st_blocks * 512 >= node_agent.journal.RESERVE_BYTES
    fenced = msgspec.structs.replace(RECORD, serving_side=SideName.STANDBY)
    monkeypatch.setattr(node_agent.journal, "write_file", write_on_full_disk)
    journal.put(fenced)
    assert Journal(tmp_path, "n1").deployment("search") == fenced
    assert reserve.exists(), "for the next one"
