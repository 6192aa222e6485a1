"""The log's thread as other threads meet it: held up by its disk or its network, flooded, ending at the wrong moment."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from raftmeta.config import ServerConfig
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import Outcome
from raftmeta.durable import File, OsDisk, lock_directory
from raftmeta.log.peers import PeerEvent
from raftmeta.log.proposals import MAX_QUEUED_BYTES
from raftmeta.log.runner import GOSSIP_BYTES, Ends, Identity, Runner
from raftmeta.log.solo import SoloNetwork
from raftmeta.log.ticket import Ticket
from raftmeta.member import Member
from raftmeta.parts import open_parts
from tests.support.commands import publication
from tests.support.trio import Trio

STALL_S = 1.0  # more than a wait of the thread lasts


class Gate:
    """Open until it is closed; who comes then stays until it opens."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.held = threading.Event()  # somebody stands here

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        if not self._open.is_set():
            self.held.set()
            assert self._open.wait(60)


class HeldDisk(OsDisk):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def fdatasync(self, file: File) -> None:
        if threading.current_thread().name == "raftmeta-log":
            self._gate.pass_through()
        super().fdatasync(file)


class HeldNetwork(SoloNetwork):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    def poll(self, timeout_s: float) -> list[PeerEvent]:
        events = super().poll(timeout_s)
        self._gate.pass_through()
        return events


class World:
    """A single member whose log's thread a test can stop in a sync or in a wait."""

    def __init__(self, directory: Path) -> None:
        self.disk, self.network = Gate(), Gate()
        config = ServerConfig.development(directory)
        lock = lock_directory(directory)
        parts = open_parts(config, HeldDisk(self.disk))
        parts = msgspec.structs.replace(parts, network=HeldNetwork(self.network))
        self.member = Member(config, parts, lock)
        self.member.start()
        assert isinstance(self.member.log, Runner)
        self.log: Runner = self.member.log
        self.propose("first").result(10)

    def propose(self, label: str, timeout_s: float = 10.0, manifest: bytes = b"") -> Ticket[Outcome]:
        return self.log.propose(publication(label=label, manifest=manifest), f"key-{label}", "somebody", timeout_s)

    def hold_in_a_sync(self) -> Ticket[Outcome]:
        """The write whose sync does not return."""
        self.disk.close()
        ticket = self.propose("held")
        assert self.disk.held.wait(10)
        return ticket

    def stop(self) -> None:
        self.disk.open()
        self.network.open()
        self.member.stop()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    for name in [name for name in os.environ if name.startswith("RAFTMETA_")]:
        monkeypatch.delenv(name)
    made = World(tmp_path)
    yield made
    made.stop()


def until(holds: Callable[[], bool]) -> bool:
    pause = threading.Event()
    return any(holds() or pause.wait(0.01) for _ in range(1_000))


def code_of(ticket: Ticket[Outcome]) -> str:
    try:
        return ticket.result(10).code
    except RaftmetaError as error:
        return error.code


def test_a_wait_for_the_network_that_does_not_end_shows_as_a_stall(world: World) -> None:
    world.network.close()
    assert until(lambda: world.log.stalled_s() > STALL_S)


def test_a_sync_at_rest_that_does_not_end_shows_as_a_stall(world: World) -> None:
    world.disk.close()  # nobody writes: the thread holds on when it settles what the last write left
    assert until(lambda: world.log.stalled_s() > STALL_S)


def test_a_command_that_waited_beyond_its_deadline_for_a_held_up_log_is_not_proposed(world: World) -> None:
    held = world.hold_in_a_sync()
    late, other = world.propose("late", timeout_s=0.0), world.propose("other")
    world.disk.open()
    assert [code_of(ticket) for ticket in (held, late, other)] == ["ok", "no_leader", "ok"]
    assert {version.label for version in world.member.state.versions.values()} == {"first", "held", "other"}


def test_what_waits_for_a_held_up_log_is_bounded_and_all_of_it_ends(world: World) -> None:
    held = world.hold_in_a_sync()
    size = 1 << 20
    number = 2 * MAX_QUEUED_BYTES // size
    tickets = [world.propose(f"many-{at}", manifest=bytes(size)) for at in range(number)]
    refused = [ticket for ticket in tickets if ticket.done()]
    assert number // 2 <= len(refused) < number
    assert {code_of(ticket) for ticket in refused} == {"overloaded"}
    world.disk.open()
    assert code_of(held) == "ok"
    assert all(code_of(ticket) for ticket in tickets)


def test_news_that_waits_for_a_held_up_log_is_bounded_and_keeps_no_command_out(world: World) -> None:
    held = world.hold_in_a_sync()
    for _ in range(200):
        world.member.gossip("heartbeat", bytes(60_000))
    assert 0 < world.log._inbox_bytes <= GOSSIP_BYTES
    written = world.propose("beside", manifest=bytes(1 << 20))
    assert not written.done()
    world.disk.open()
    assert [code_of(ticket) for ticket in (held, written)] == ["ok", "ok"]


class SlowInbox(deque[Callable[[], object]]):
    """The log is asked to end between the look whether it runs and the leaving of a call, and gets time to do it."""

    def __init__(self, log: Runner) -> None:
        super().__init__()
        self._log = log
        self.stopper = threading.Thread(target=log.stop)

    def append(self, call: Callable[[], object]) -> None:
        self.stopper.start()
        self._log._thread.join(0.5)
        super().append(call)


def test_a_call_that_is_left_at_the_moment_of_the_end_ends_too() -> None:
    box = Trio(names=("m1",)).boxes["m1"]
    log = Runner(Identity("m1", "trio"), box.replica, box.journal, SoloNetwork(), Ends(lambda _: None, lambda _: None))
    log._inbox = inbox = SlowInbox(log)
    log.start()
    ticket = log.read_barrier(10.0)
    inbox.stopper.join()
    assert ticket.done()


def test_a_call_to_a_log_that_never_began_ends_with_it() -> None:
    box = Trio(names=("m1",)).boxes["m1"]
    log = Runner(Identity("m1", "trio"), box.replica, box.journal, SoloNetwork(), Ends(lambda _: None, lambda _: None))
    ticket = log.read_barrier(10.0)
    log.stop()
    assert ticket.done()


def test_a_single_members_network_takes_a_descriptor_of_any_number() -> None:
    code = """
import os, resource
from raftmeta.log.solo import SoloNetwork
resource.setrlimit(resource.RLIMIT_NOFILE, (1100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
hoard = [os.open("/dev/null", os.O_RDONLY) for _ in range(1050)]
network = SoloNetwork()
network.wake()
print(network.poll(10.0))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["[]"]


def test_waking_a_network_that_is_closed_touches_no_file_that_has_its_number_now() -> None:
    network = SoloNetwork()
    network.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)  # the lowest free number
    network.wake()
    network.close()
    with pytest.raises(BlockingIOError):  # nothing was written, and it is open
        os.eventfd_read(other)
    os.close(other)
