"""Members that mean well: they find each other, keep one link per pair, and notice each other's ends and restarts."""

from __future__ import annotations

import random
import socket
import threading
from pathlib import Path

import pytest

from raftmeta.core.errors import RaftmetaError
from raftmeta.log import messages as m
from raftmeta.log.dialer import Target, resolve
from raftmeta.log.hello import RETURN_S
from raftmeta.log.transport import Connected, Disconnected, Received, TlsTransport, TransportPorts, TransportSettings
from raftmeta.security.tls import PeerTls
from tests.support.mesh import Clock, Mesh

EVERY_MESSAGE: tuple[m.AnyMessage, ...] = (
    m.AppendEntries(1, 2, 3, 4, 5, (m.Entry(6, 7, b"payload"),)),
    m.AppendReply(1, True, 2, 3),
    m.RequestVote(1, 2, 3, False),
    m.VoteReply(1, True),
    m.PreVote(1, 2, 3),
    m.PreVoteReply(1, 2, True),
    m.SnapshotChunk(1, 2, 3, 4, b"d" * 32, 5, b"data", 6),
    m.SnapshotReply(1, 2, 3, True, 4),
    m.TimeoutNow(1),
    m.Forward((m.Proposal(1, "key", "alice", "a", b"body"),)),
    m.ForwardReply((m.ProposalReply(1, "ok", b"outcome", 9),)),
    m.ReadIndex(1),
    m.ReadIndexReply(1, 2),
    m.Gossip("heartbeat", b"news"),
    m.StateReport(1, b"h" * 32),
)


def test_members_link_up_and_every_kind_of_message_arrives_in_order(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a, b, c = mesh.trio()
        for message in EVERY_MESSAGE:
            assert a.transport.send("b", message)
        mesh.pump(lambda: len(b.received()) == len(EVERY_MESSAGE))
        assert b.received() == [("a", message) for message in EVERY_MESSAGE]
        assert c.received() == []
        mesh.everybody_talks()


def test_the_largest_message_arrives_and_a_larger_one_is_a_fault_of_the_caller(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a, b, _ = mesh.trio()
        overhead = len(m.encode(m.Gossip("t", bytes(m.MAX_FRAME_BYTES - 64)))) - (m.MAX_FRAME_BYTES - 64)
        largest = m.Gossip("t", bytes(m.MAX_FRAME_BYTES - overhead))
        assert len(m.encode(largest)) == m.MAX_FRAME_BYTES
        assert a.transport.send("b", largest)
        mesh.pump(lambda: b.received() == [("a", largest)])
        with pytest.raises(ValueError, match="limit 16777216"):
            a.transport.send("b", m.Gossip("t", bytes(m.MAX_FRAME_BYTES)))


def test_connected_tells_the_incarnation_of_the_peer(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a, b, c = mesh.trio()
        assert {(e.peer, e.incarnation) for e in a.links() if isinstance(e, Connected)} == {
            ("b", b.settings.incarnation),
            ("c", c.settings.incarnation),
        }
        assert b.settings.incarnation != c.settings.incarnation


@pytest.mark.parametrize("seed", range(8))
def test_members_that_dial_each_other_at_the_same_moment_end_with_one_link(tmp_path: Path, seed: int) -> None:
    """Whoever is polled when: exactly one link per pair lives, and it stays."""
    rng = random.Random(seed)
    with Mesh(tmp_path) as mesh:
        for member_id in "abc":
            mesh.add(member_id)
        mesh.introduce()
        members = list(mesh.members.values())
        for _ in range(60):
            member = rng.choice(members)
            member.events += member.transport.poll(0.0)
        mesh.pump(mesh.linked)
        mesh.everybody_talks()
        before = {name: len(member.links()) for name, member in mesh.members.items()}
        mesh.turns(30)
        assert {name: len(member.links()) for name, member in mesh.members.items()} == before
        for member in members:
            live = [event.peer for event in member.links() if isinstance(event, Connected)]
            gone = [event.peer for event in member.links() if isinstance(event, Disconnected)]
            assert len(live) - len(gone) == 2


def test_a_link_tells_what_the_peers_build_can_run_and_one_that_can_run_too_little_gets_none(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a, b, _ = mesh.trio(feature=2)
        assert {event.feature for event in a.links() if isinstance(event, Connected)} == {2}
        for member in (a, mesh.members["c"]):
            member.transport.require_feature(2)
        b.transport.close()
        old = mesh.add("b", files=b.files, feature=1)
        mesh.introduce()
        b.polled = False
        mesh.pump(lambda: a.count("refused_feature_too_low") + mesh.members["c"].count("refused_feature_too_low") >= 2)
        assert "b" not in a.transport.connected() | mesh.members["c"].transport.connected()
        old.polled = False


def test_a_restarted_peer_replaces_its_former_link_and_the_end_is_told_first(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a, b, _ = mesh.trio()
        b.polled = False  # the old process hangs: its end of the link stays open
        mark = len(a.links())
        fresh = mesh.add("b", files=b.files)
        mesh.introduce()
        mesh.pump(lambda: fresh.transport.connected() == {"a", "c"})
        assert a.links()[mark:] == [Disconnected("b"), Connected("b", fresh.settings.incarnation)]
        mesh.everybody_talks()
        mark = len(a.links())
        for _ in range(40):  # the old process wakes up and tries again: it lost its place
            b.clock.advance(0.5)
            b.transport.poll(0.0)
            mesh.turn()
        assert a.count("refused_stale_incarnation") > 0
        assert a.links()[mark:] == []


def test_of_two_processes_under_one_name_the_older_stays_out_although_the_link_of_the_newer_broke(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a, older, _ = mesh.trio()
        older.polled = False
        fresh = mesh.add("b", files=older.files)
        mesh.introduce()
        mesh.pump(lambda: fresh.transport.connected() == {"a", "c"})
        fresh.polled = False
        fresh.transport.close()
        mesh.pump(lambda: "b" not in a.transport.connected())
        mesh.members["b"], older.polled = older, True
        older.clock.advance(5.0)
        mesh.pump(lambda: a.count("refused_stale_incarnation") > 0)
        assert "b" not in a.transport.connected()
        a.clock.advance(RETURN_S)  # the newer one does not come back: it may have been the older
        older.clock.advance(5.0)
        mesh.pump(lambda: "b" in a.transport.connected())


def test_a_hello_that_is_never_answered_does_not_keep_the_peers_next_process_out(tmp_path: Path) -> None:
    """The dial of the smaller id counts as a link only for a moment; the process that took its hello may be gone."""
    with Mesh(tmp_path) as mesh, socket.create_server(("127.0.0.1", 0)) as listener:
        a, fresh = mesh.add("a"), mesh.add("b")
        a.transport.set_peers({"b": f"127.0.0.1:{listener.getsockname()[1]}"})
        mesh.turns(2)
        assert fresh.files is not None
        hung = mesh.take(listener, fresh.files)
        mesh.pump(hung.read)  # a's hello is out
        fresh.transport.set_peers({"a": a.transport.address()})
        mesh.pump(lambda: a.count("refused_duplicate") > 0)
        assert a.transport.connected() == frozenset()
        a.clock.advance(0.6)
        mesh.pump(lambda: "b" in a.transport.connected())
        mesh.talk("a", "b")
        assert a.links() == [Connected("b", fresh.settings.incarnation)]


def test_a_lost_link_is_told_once_and_comes_back(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a, b, _ = mesh.trio()
        address = b.transport.address()
        b.transport.close()
        b.polled = False
        mesh.pump(lambda: "b" not in a.transport.connected())
        assert a.links()[-1] == Disconnected("b")
        assert not a.transport.send("b", m.TimeoutNow(1))
        assert a.transport.queued_bytes("b") == 0
        again = mesh.add("b", files=b.files, listen=address)
        again.transport.set_peers(mesh.addresses())
        mesh.pump(mesh.linked)
        mesh.everybody_talks()


def test_messages_sent_before_the_end_of_a_link_are_told_before_it(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a, b, _ = mesh.trio()
        mark = len(a.events)
        for number in range(50):
            b.transport.send("a", m.ReadIndex(number))
        b.transport.close()
        b.polled = False
        mesh.pump(lambda: Disconnected("b") in a.events)
        from_b = [event for event in a.events[mark:] if event.peer == "b"]
        assert from_b == [*(Received("b", m.ReadIndex(number)) for number in range(50)), Disconnected("b")]


def test_a_silent_peer_is_dropped_after_the_idle_time_and_a_quiet_one_is_not(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a, b, c = mesh.trio(idle_s=30.0, keepalive_s=5.0)
        for _ in range(12):  # a minute of quiet: keepalives alone keep the links
            for member in (a, b, c):
                member.clock.advance(5.0)
            mesh.turns(2)
        assert not any(isinstance(event, Disconnected) for member in (a, b, c) for event in member.events)
        b.polled = False  # hangs; the kernel still acknowledges
        for _ in range(8):
            a.clock.advance(5.0)
            c.clock.advance(5.0)
            mesh.turns(2)
        assert a.links()[-1] == Disconnected("b")
        assert a.transport.connected() == {"c"}


def test_bytes_that_arrived_while_the_member_itself_hung_are_read_before_it_judges_silence(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a, b, _ = mesh.trio(idle_s=30.0)
        a.polled = False
        b.transport.send("a", m.ReadIndex(1))
        mesh.turns(3)
        a.clock.advance(31.0)
        a.polled = True
        mesh.turn()
        assert ("b", m.ReadIndex(1)) in a.received()
        assert "b" in a.transport.connected()


def test_a_peer_that_is_no_longer_configured_is_cut_off_and_refused(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a, b, c = mesh.trio()
        a.transport.set_peers({"c": c.transport.address()})
        mesh.pump(lambda: a.count("refused_unknown_member") > 0)
        assert a.links()[-1] == Disconnected("b")
        assert a.transport.connected() == {"c"}
        mesh.talk("a", "c")
        a.transport.set_peers(mesh.addresses())
        mesh.pump(mesh.linked)
        assert b.transport.connected() == {"a", "c"}


def test_a_peer_at_a_new_address_is_found(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a, b, _ = mesh.trio()
        b.transport.close()
        moved = mesh.add("b", files=b.files)
        mesh.introduce()
        mesh.pump(mesh.linked)
        assert Connected("b", moved.settings.incarnation) in a.events


def test_a_peer_whose_address_cannot_be_used_is_reported_and_may_still_come(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a, b, c = mesh.add("a"), mesh.add("b"), mesh.add("c")
        a.transport.set_peers({**mesh.addresses(), "b": "nonsense"})
        c.transport.set_peers(mesh.addresses())
        mesh.pump(lambda: "c" in a.transport.connected())
        assert a.count("bad_peer_address") == 1
        b.transport.set_peers(mesh.addresses())
        mesh.pump(mesh.linked)
        mesh.everybody_talks()


def test_an_idle_time_shorter_than_the_keepalive_does_not_break_quiet_links(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a, b, c = mesh.trio(idle_s=40.0, keepalive_s=1000.0)
        for _ in range(10):
            for member in (a, b, c):
                member.clock.advance(10.0)
            mesh.turns(2)
        assert not any(isinstance(event, Disconnected) for member in (a, b, c) for event in member.events)


def test_a_message_that_the_peers_role_may_not_send_is_dropped_and_counted(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        ports = TransportPorts(rng=random.Random(1), allowed=lambda peer, kind: (peer, kind) != ("b", m.RequestVote))
        a = mesh.add("a", ports=ports)
        b = mesh.add("b")
        c = mesh.add("c")
        mesh.introduce()
        mesh.pump(mesh.linked)
        for sender in (b, c):
            sender.transport.send("a", m.RequestVote(10**9, 1, 1, False))
            sender.transport.send("a", m.ReadIndex(1))
        mesh.pump(lambda: len(a.received()) == 3)
        assert ("b", m.RequestVote(10**9, 1, 1, False)) not in a.received()
        assert ("c", m.RequestVote(10**9, 1, 1, False)) in a.received()
        assert a.count("message_not_allowed") == 1
        assert "b" in a.transport.connected()


def test_wake_ends_a_poll_from_another_thread_and_is_harmless_after_close(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a = mesh.add("a")
        a.transport.poll(0.0)
        waiting = threading.Thread(target=a.transport.poll, args=(600.0,))
        waiting.start()
        a.transport.wake()
        waiting.join(20)
        assert not waiting.is_alive()
        a.transport.close()
        a.transport.close()
        a.transport.wake()


def test_a_taken_port_is_a_clear_error(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a = mesh.add("a")
        with pytest.raises(RaftmetaError, match=f"peer address {a.transport.address()} of member 'b'.*another process listens there"):
            mesh.add("b", listen=a.transport.address())


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "10.1.2.3:7000", "[::]:0", "example.test:7000"])
def test_plain_links_are_refused_beyond_loopback(listen: str) -> None:
    with pytest.raises(ValueError, match="loopback only"):
        TlsTransport(TransportSettings("c1", "a", listen), None)


def test_plain_links_work_on_loopback_and_take_no_peer_beyond_it(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a = mesh.add_plain("a")
        mesh.add_plain("b")
        mesh.introduce()
        mesh.pump(mesh.linked)
        mesh.everybody_talks()
        a.transport.set_peers({"b": "192.0.2.1:7000"})
        assert a.count("bad_peer_address") == 1


def test_a_queue_bound_that_cannot_hold_one_message_is_refused(tmp_path: Path) -> None:
    files = Mesh(tmp_path).authority.member("a")
    with pytest.raises(ValueError, match="queue_bytes must hold one frame"):
        TlsTransport(TransportSettings("c1", "a", "127.0.0.1:0", queue_bytes=1 << 20), PeerTls(files))


def test_a_name_server_that_does_not_answer_delays_nobody_else(tmp_path: Path) -> None:
    release, asked = threading.Event(), threading.Event()

    def slow(host: str, port: int) -> tuple[Target, ...]:
        asked.set()
        release.wait(20)
        return (Target(socket.AF_INET, ("127.0.0.1", port)),)

    with Mesh(tmp_path) as mesh:
        a = mesh.add("a", ports=TransportPorts(rng=random.Random(1), resolve=slow))
        b = mesh.add("b")
        c = mesh.add("c")
        port_of_b = b.transport.address().rpartition(":")[2]
        a.transport.set_peers({"b": f"zone-b.test:{port_of_b}", "c": c.transport.address()})
        c.transport.set_peers({"a": a.transport.address()})
        b.transport.set_peers({"a": "127.0.0.1:1"})  # so that only a's dial can make the link
        mesh.pump(lambda: asked.is_set() and "c" in a.transport.connected())
        mesh.talk("a", "c")
        assert "b" not in a.transport.connected()
        release.set()
        mesh.pump(lambda: "b" in a.transport.connected())
        mesh.talk("a", "b")


def test_a_name_that_does_not_exist_is_tried_again(tmp_path: Path) -> None:
    answers: list[OSError | None] = [socket.gaierror(-2, "Name or service not known"), None]

    def fails_once(host: str, port: int) -> tuple[Target, ...]:
        answer = answers.pop(0) if answers else None
        if answer is not None:
            raise answer
        return tuple(resolve("127.0.0.1", port))

    with Mesh(tmp_path) as mesh:
        a = mesh.add("a", ports=TransportPorts(rng=random.Random(1), resolve=fails_once))
        b = mesh.add("b")
        a.transport.set_peers({"b": f"zone-b.test:{b.transport.address().rpartition(':')[2]}"})
        b.transport.set_peers({"a": "127.0.0.1:1"})
        mesh.pump(lambda: "b" in a.transport.connected())
        assert a.count("dial_failed") == 1


def test_a_dial_that_hangs_is_given_up_and_repeated(tmp_path: Path) -> None:
    clock = Clock()
    with Mesh(tmp_path) as mesh, socket.create_server(("127.0.0.1", 0)) as dead_end:
        a = mesh.add("a", ports=TransportPorts(clock=clock, rng=random.Random(1)), handshake_s=5.0)
        a.transport.set_peers({"b": f"127.0.0.1:{dead_end.getsockname()[1]}"})  # accepts by backlog, never answers
        dead_end.setblocking(False)
        accepted = 0
        for _ in range(10):
            clock.advance(2.0)
            mesh.turns(3)
            try:
                dead_end.accept()[0].close()
                accepted += 1
            except BlockingIOError:
                pass
        assert accepted >= 2
        assert a.count("refused_handshake_timeout") + a.count("dial_failed") >= 2


def test_a_burst_larger_than_one_poll_takes_arrives_completely(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a, b, _ = mesh.trio()
        for number in range(20_000):
            assert a.transport.send("b", m.ReadIndex(number))
        most = 0
        b.polled = False  # but here

        def all_here() -> bool:
            nonlocal most
            before = len(b.events)
            b.events += b.transport.poll(0.0)
            most = max(most, len(b.events) - before)
            return len(b.received()) == 20_000

        mesh.pump(all_here)
        assert [message for _, message in b.received()] == [m.ReadIndex(number) for number in range(20_000)]
        assert most <= 4096 + 1
