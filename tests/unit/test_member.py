"""A member as the API sees it: what it tells of its links."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import structlog

from raftmeta.config import InitialMember, PeerConfig, ServerConfig
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.events import Event
from raftmeta.durable import OsDisk
from raftmeta.log import quarantine
from raftmeta.log.quarantine import Quarantine
from raftmeta.member import Member
from raftmeta.watch import WatchHub
from tests.support.commands import publication


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RAFTMETA_")]:
        monkeypatch.delenv(name)


def one_of_two(data_dir: Path, nobody_at: str) -> ServerConfig:
    """Member a, whose peer is not there."""
    return ServerConfig(
        member_id="a",
        zone="a",
        cluster_id="c",
        data_dir=data_dir,
        peer=PeerConfig(listen="127.0.0.1:0", plain=True),
        members=tuple(InitialMember(id=name, zone=name, peer_address=nobody_at, api_url="http://127.0.0.1:1") for name in "ab"),
    )


def test_what_happens_on_the_links_is_counted_by_name(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        nobody_at = f"127.0.0.1:{nobody.getsockname()[1]}"
    config = one_of_two(tmp_path, nobody_at)
    member, pause = Member.open(config), threading.Event()
    try:
        assert member.peer_events == {}
        member.start()
        for _ in range(1_000):
            if member.peer_events.get("dial_failed"):
                break
            pause.wait(0.01)
        assert set(member.peer_events) == {"dial_failed"}
    finally:
        member.stop()


@pytest.mark.parametrize("record", [b"", b"not what was written", None], ids=["empty", "damaged", "missing"])
def test_evidence_that_cannot_be_read_keeps_no_healthy_member_down(tmp_path: Path, record: bytes | None) -> None:
    """The record only says why; the files beside it are what counts, and they make a second setting aside stop."""
    journal = tmp_path / "quarantined/journal"
    journal.mkdir(parents=True)
    (journal / "hard-state").write_bytes(b"evidence")
    if record is not None:
        (tmp_path / "quarantined/record").write_bytes(record)
    member = Member.open(ServerConfig.development(tmp_path))
    try:
        checks = {check.name: check for check in member.checks()}
        assert all(check.ok for check in checks.values())
        assert str(tmp_path / "quarantined/record") in checks["kept-files"].reason
        with pytest.raises(RaftmetaError, match="set aside before"):
            quarantine.mark(OsDisk(), tmp_path, Quarantine("state_differs", "again", 1, ""))
    finally:
        member.stop()


def test_a_single_member_has_no_links(tmp_path: Path) -> None:
    member = Member.open(ServerConfig.development(tmp_path))
    try:
        assert member.peer_events == {}
    finally:
        member.stop()


def everything_in(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Owner, time of the last change and content of every file and folder."""
    return {
        str(path): (path.lstat().st_uid, path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in (directory, *sorted(directory.rglob("*")))
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_member_that_is_started_as_another_user_than_the_owner_of_its_data_refuses_and_touches_no_file(tmp_path: Path) -> None:
    config = ServerConfig.development(tmp_path / "data")
    member = Member.open(config)
    member.start()
    member.log.propose(publication(), "key", "somebody", 10.0).result(10.0)
    member.stop()
    for path in (tmp_path / "data", *(tmp_path / "data").rglob("*")):
        os.chown(path, 12345, 12345)
    before = everything_in(tmp_path)
    with pytest.raises(RaftmetaError, match="belongs to user id 12345, this process runs as user id 0; run it as the owner"):
        Member.open(config)
    assert everything_in(tmp_path) == before


class BrokenHub(WatchHub):
    """An observer that breaks its promise not to raise, as a defect would."""

    def publish(self, events: Sequence[Event], revision: int) -> None:
        raise OSError("broken")


class BrokenReader:
    def critical(self, line: str) -> None:
        raise BrokenPipeError

    error = warning = info = critical


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_member_whose_log_fails_says_so_to_its_process_before_it_says_anything_else(tmp_path: Path) -> None:
    structlog.configure(logger_factory=lambda *_: BrokenReader())
    member, told = Member.open(ServerConfig.development(tmp_path)), threading.Event()
    try:
        member.watch = BrokenHub(0)
        member.on_failed = told.set
        member.start()
        member.log.propose(publication(), "key", "somebody", 10.0)
        assert told.wait(10)
        assert (member.failed.is_set(), member.fault, member.log.status().role) == (True, "OSError: broken", "stopped")
    finally:
        member.stop()
        structlog.reset_defaults()


def test_a_member_of_several_whose_state_nobody_compared_is_not_ready_and_says_why(tmp_path: Path) -> None:
    config = one_of_two(tmp_path, "127.0.0.1:1")
    member = Member.open(config)
    try:
        member._replica.engine.joining = False  # what it holds is all there is
        (state,) = [check for check in member.checks() if check.name == "state"]
        assert not state.ok and "no majority has compared its state" in state.reason
        member._replica._reports.compared = True
        assert all(check.ok for check in member.checks())
    finally:
        member.stop()


def test_a_member_that_a_majority_contradicts_is_not_ready_and_says_why(tmp_path: Path) -> None:
    member = Member.open(ServerConfig.development(tmp_path))
    try:
        assert member.unsound == ""
        member._replica._reports._contradicted = (7, "state hashes at revision 7 differ: b and c: 00, a: 01")
        assert "revision 7" in member.unsound
        assert [check.ok for check in member.checks() if check.name == "state"] == [False]
    finally:
        member.stop()


def test_what_a_member_applies_while_a_majority_contradicts_it_is_told_no_watch(tmp_path: Path) -> None:
    member = Member.open(ServerConfig.development(tmp_path))
    try:
        reports, state = member._replica._reports, member.state
        later = [msgspec.structs.replace(state, revision=revision) for revision in (1, 2, 3)]
        event = Event(1, "model", "m", "put", None)
        with member.watch.subscribe(0) as early:
            member.applied(later[0], [event])
            assert len(early.take()) == 1
            reports._contradicted = (1, "b and c: 00, a: 01")
            member._replica.contradicted()
            with pytest.raises(RaftmetaError, match="compacted"):
                early.take()
        member.applied(later[2], [msgspec.structs.replace(event, revision=3)])
        assert member.watch.retained == (0, 0)
        member.replaced(later[1])  # another member's state, which has not come as far as the wrong one
        reports._contradicted = None
        assert (member.watch.floor, member.watch.revision) == (2, 2)
        member.applied(later[2], [msgspec.structs.replace(event, revision=3)])
        with member.watch.subscribe(2) as watch:
            assert [change.revision for change, _ in watch.take()] == [3]
    finally:
        member.stop()
