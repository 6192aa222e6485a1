"""Strangers and broken peers on the port: each loses its own connection with a counted reason, and the members go on talking."""

from __future__ import annotations

import datetime as dt
import ssl
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raftmeta.log import hello as rules
from raftmeta.log import messages as m
from raftmeta.log.hello import member_uri
from raftmeta.log.transport import Connected, Disconnected, TransportPorts
from raftmeta.security.certificates import Subject, Validity
from raftmeta.security.tls import TlsFiles
from tests.support.certificates import HOSTS, TestAuthority
from tests.support.mesh import Mesh, RawConnection, client_context, frame

SHARED = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)

GARBAGE = {
    "nothing": b"",
    "one byte": b"\x16",
    "http": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "zeros": bytes(4096),
    "a tls record that promises more": b"\x16\x03\x01\x40\x00" + b"\x01" * 100,
    "a frame of ours without tls": frame(b"\x98\x64"),
    "a huge length": b"\xff\xff\xff\xff" + bytes(100),
    "a pickle": b"\x80\x04cposix\nsystem\n(S'true'\ntR.",
}


def undisturbed(mesh: Mesh) -> None:
    """Everybody still talks over the links that there were."""
    mesh.everybody_talks()
    for member in mesh.members.values():
        assert not any(isinstance(event, Disconnected) for event in member.events)


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_on_the_port_is_closed_by_the_deadline_at_the_latest(tmp_path: Path, data: bytes) -> None:
    with Mesh(tmp_path) as mesh:
        a, _, _ = mesh.trio(handshake_s=5.0)
        stranger = mesh.dial("a")
        stranger.send(data)
        mesh.turns(5)
        undisturbed(mesh)
        a.clock.advance(5.1)
        mesh.pump(stranger.is_closed)
        assert a.count("refused_handshake_timeout") + a.count("refused_bad_tls") + a.count("pending_closed") == 1
        undisturbed(mesh)


def test_any_bytes_on_the_port_harm_nobody(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a, _, _ = mesh.trio()

        @SHARED
        @given(st.binary(min_size=1, max_size=600), st.booleans())
        def try_bytes(data: bytes, hang_up: bool) -> None:
            stranger = mesh.dial("a")
            stranger.send(data)
            mesh.turns(2)
            if hang_up:
                stranger.close()
            mesh.turns(2)

        try_bytes()
        undisturbed(mesh)
        assert a.transport.connected() == {"b", "c"}


def test_a_byte_at_a_time_does_not_extend_the_deadline(tmp_path: Path) -> None:
    """Slow loris: the deadline counts from accept, whatever arrives."""
    with Mesh(tmp_path) as mesh:
        a, _, _ = mesh.trio(handshake_s=5.0)
        stranger = mesh.dial("a")
        for byte in b"\x16\x03\x01\x02\x00\x01":
            stranger.send(bytes([byte]))
            a.clock.advance(0.9)
            mesh.turns(2)
        mesh.pump(stranger.is_closed)
        assert a.count("refused_handshake_timeout") == 1
        undisturbed(mesh)


def test_a_member_that_never_says_hello_is_closed_by_the_deadline(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a, b, _ = mesh.trio(handshake_s=5.0)
        silent = mesh.dial_tls("a", b.files)
        mesh.turns(5)
        a.clock.advance(5.1)
        mesh.pump(silent.is_closed)
        assert a.count("refused_handshake_timeout") == 1
        undisturbed(mesh)


def test_a_flood_of_connections_is_bounded_and_a_member_gets_in_all_the_same(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a = mesh.add("a", pending_connections=8)
        mesh.add("b")
        flood = [mesh.dial("a") for _ in range(40)]
        mesh.pump(lambda: sum(stranger.is_closed() for stranger in flood) >= 32)
        mesh.turns(5)
        assert sum(not stranger.is_closed() for stranger in flood) == 8
        assert a.count("refused_too_many_pending") == 32
        mesh.introduce()
        mesh.pump(mesh.linked)
        mesh.everybody_talks()


def test_strangers_get_a_bounded_share_of_one_poll(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a = mesh.add("a")
        for _ in range(30):
            mesh.dial("a").send(b"GET / HTTP/1.1\r\n\r\n")
        before = 0
        while before < 30:
            mesh.turn()
            assert a.count("refused_bad_tls") - before <= 8
            before = a.count("refused_bad_tls")


def test_a_stranger_that_comes_again_and_again_does_not_flood_the_log(tmp_path: Path) -> None:
    now = [1000.0]
    with Mesh(tmp_path) as mesh, structlog.testing.capture_logs() as lines:
        a = mesh.add("a", ports=TransportPorts(clock=lambda: now[0]))
        for _ in range(20):
            mesh.dial("a").send(b"GET / HTTP/1.1\r\n\r\n")
        mesh.pump(lambda: a.count("refused_bad_tls") == 20)
        assert [line["suppressed"] for line in lines if line["event"] == "refused_bad_tls"] == [0]
        now[0] += 1.1
        mesh.dial("a").send(b"GET / HTTP/1.1\r\n\r\n")
        mesh.pump(lambda: a.count("refused_bad_tls") == 21)
        assert [line["suppressed"] for line in lines if line["event"] == "refused_bad_tls"] == [0, 19]


def other_cluster(mesh: Mesh, tmp_path: Path) -> TlsFiles:
    return TestAuthority(tmp_path / "other", "c1").member("b")


def other_name(mesh: Mesh, tmp_path: Path) -> TlsFiles:
    return mesh.authority.member("b", cluster_id="c2")


def expired(mesh: Mesh, tmp_path: Path) -> TlsFiles:
    return mesh.authority.expired("b")


def not_yet(mesh: Mesh, tmp_path: Path) -> TlsFiles:
    later = Validity.days(mesh.authority.now + dt.timedelta(days=2), 10)
    return mesh.authority.files("later", Subject("b", HOSTS, member_uri("c1", "b")), later)


def agent(mesh: Mesh, tmp_path: Path) -> TlsFiles:
    return mesh.authority.agent("node-b1")


def nameless(mesh: Mesh, tmp_path: Path) -> TlsFiles:
    return mesh.authority.files("nameless", Subject("b", HOSTS), Validity.days(mesh.authority.now, 10))


def unknown(mesh: Mesh, tmp_path: Path) -> TlsFiles:
    return mesh.authority.member("x")


def own(mesh: Mesh, tmp_path: Path) -> TlsFiles:
    return mesh.authority.member("a")


@pytest.mark.parametrize(
    ("make", "counter"),
    [
        (other_cluster, "refused_certificate_untrusted"),
        (other_name, "refused_wrong_cluster"),
        (expired, "refused_certificate_expired"),
        (not_yet, "refused_certificate_not_yet_valid"),
        (agent, "refused_certificate_untrusted"),
        (nameless, "refused_certificate_name"),
        (unknown, "refused_unknown_member"),
        (own, "refused_self_connection"),
    ],
)
def test_a_certificate_that_proves_no_peer_is_refused_with_a_line_in_the_log(
    tmp_path: Path, make: Callable[[Mesh, Path], TlsFiles], counter: str
) -> None:
    with Mesh(tmp_path) as mesh, structlog.testing.capture_logs() as lines:
        a, _, _ = mesh.trio()
        intruder = mesh.dial_tls("a", make(mesh, tmp_path))
        intruder.hello("b", incarnation=99, dial=1)
        mesh.pump(intruder.is_closed)
        assert a.count(counter) == 1
        assert intruder.received == b"", "a refused connection learns nothing"
        said = [line for line in lines if line["event"] == counter and line["member"] == "a"]
        assert [(line["log_level"], line["remote"]) for line in said] == [("warning", "127.0.0.1")]
        assert said[0]["detail"]
        undisturbed(mesh)


def test_a_connection_without_a_certificate_is_refused(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a, _, _ = mesh.trio()
        intruder = mesh.dial_tls("a", None)
        intruder.hello("b", incarnation=99)
        mesh.pump(intruder.is_closed)
        assert a.count("refused_certificate_missing") == 1
        undisturbed(mesh)


def test_an_older_tls_is_refused(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a, b, _ = mesh.trio()
        context = client_context(b.files, mesh.authority)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
            mesh.dial("a").start_tls(context)
        mesh.pump(lambda: a.count("refused_bad_tls") == 1)
        undisturbed(mesh)


def test_a_dialler_refuses_an_impostor_at_the_peers_address(tmp_path: Path) -> None:
    """The other end of a dial must prove to be the member that was dialled."""
    with Mesh(tmp_path) as mesh:
        a = mesh.add("a")
        c = mesh.add("c")
        stranger = mesh.add("x", files=TestAuthority(tmp_path / "other", "c1").member("b"))
        a.transport.set_peers({"b": stranger.transport.address(), "c": c.transport.address()})
        c.transport.set_peers({"a": a.transport.address()})
        mesh.pump(lambda: a.count("refused_certificate_untrusted") > 0 and "c" in a.transport.connected())
        a.transport.set_peers({"b": c.transport.address(), "c": c.transport.address()})
        mesh.pump(lambda: a.count("refused_wrong_member") > 0)
        a.transport.set_peers({"b": a.transport.address(), "c": c.transport.address()})
        mesh.pump(lambda: a.count("refused_self_connection") > 0)
        assert a.transport.connected() == {"c"}
        mesh.talk("a", "c")


@pytest.mark.parametrize(
    ("changes", "counter"),
    [
        ({"member_id": "c"}, "refused_wrong_member"),
        ({"cluster_id": "c2"}, "refused_wrong_cluster"),
        ({"protocol": 2}, "refused_wrong_protocol"),
    ],
)
def test_a_hello_that_contradicts_its_certificate_is_refused(tmp_path: Path, changes: dict[str, object], counter: str) -> None:
    with Mesh(tmp_path) as mesh:
        a, b, _ = mesh.trio()
        liar = mesh.dial_tls("a", b.files)
        liar.hello("b", **{"incarnation": 99, **changes})
        mesh.pump(liar.is_closed)
        assert a.count(counter) == 1
        undisturbed(mesh)


@pytest.mark.parametrize(
    ("data", "counter"),
    [
        (frame(m.encode(m.RequestVote(10**9, 1, 1, False))), "refused_bad_hello"),
        (frame(b""), "refused_bad_hello"),
        (frame(b"\x00" * 100), "refused_bad_hello"),
        (frame(b"\x80\x04cposix\nsystem\n(S'true'\ntR."), "refused_bad_hello"),
        ((rules.MAX_HELLO_BYTES + 1).to_bytes(4, "little"), "refused_frame_too_large"),
    ],
)
def test_nothing_but_a_small_hello_is_taken_first(tmp_path: Path, data: bytes, counter: str) -> None:
    with Mesh(tmp_path) as mesh:
        a, b, _ = mesh.trio()
        peer = mesh.dial_tls("a", b.files)
        peer.send(data)
        mesh.pump(peer.is_closed)
        assert a.count(counter) == 1
        assert all(not isinstance(message, m.RequestVote) for _, message in a.received())
        undisturbed(mesh)


def impostor(mesh: Mesh, **changes: object) -> RawConnection:
    """A raw connection that member a takes for its peer b; b itself must not be running."""
    raw = mesh.dial_tls("a", mesh.authority.member("b"))
    raw.hello("b", **changes)
    return raw


def pair_with_raw(mesh: Mesh) -> None:
    a = mesh.add("a", handshake_s=1e6)
    mesh.add("c")
    mesh.introduce()
    a.transport.set_peers({"b": "127.0.0.1:1", "c": mesh.members["c"].transport.address()})
    mesh.pump(lambda: "c" in a.transport.connected())


@pytest.mark.parametrize(
    ("data", "counter"),
    [
        (frame(b"\x93\x01\x02\x03"), "refused_bad_message"),
        (frame(b"\x92\xcc\xc8\x01"), "refused_bad_message"),
        (frame(b"\x80\x04cposix\nsystem\n(S'true'\ntR."), "refused_bad_message"),
        (frame(m.encode(m.TimeoutNow(1)) + b"\x00"), "refused_bad_message"),
        ((m.MAX_FRAME_BYTES + 1).to_bytes(4, "little"), "refused_frame_too_large"),
    ],
)
def test_a_peer_that_leaves_the_schema_loses_its_link_and_nobody_else_does(tmp_path: Path, data: bytes, counter: str) -> None:
    with Mesh(tmp_path) as mesh:
        pair_with_raw(mesh)
        a = mesh.members["a"]
        raw = impostor(mesh)
        raw.send(frame(m.encode(m.TimeoutNow(5))))
        mesh.pump(lambda: ("b", m.TimeoutNow(5)) in a.received())
        raw.send(data)
        mesh.pump(raw.is_closed)
        assert a.count(counter) == 1
        assert a.links()[-1] == Disconnected("b")
        assert a.received() == [("b", m.TimeoutNow(5))]
        mesh.talk("c", "a")


def test_a_second_hello_on_a_live_link_ends_it(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        pair_with_raw(mesh)
        raw = impostor(mesh)
        mesh.pump(lambda: "b" in mesh.members["a"].transport.connected())
        raw.hello("b", dial=2)
        mesh.pump(raw.is_closed)
        assert mesh.members["a"].count("refused_bad_message") == 1


def test_a_replayed_hello_is_refused_and_the_live_link_stays(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        pair_with_raw(mesh)
        a = mesh.members["a"]
        live = impostor(mesh, incarnation=7, dial=3)
        mesh.pump(lambda: "b" in a.transport.connected())
        for dial in (3, 2):
            replay = impostor(mesh, incarnation=7, dial=dial)
            mesh.pump(replay.is_closed)
        assert a.count("refused_replayed") == 2
        live.send(frame(m.encode(m.TimeoutNow(9))))
        mesh.pump(lambda: ("b", m.TimeoutNow(9)) in a.received())


def test_a_second_connection_of_a_peer_closes_the_first_and_only_the_second_is_heard(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        pair_with_raw(mesh)
        a = mesh.members["a"]
        first = impostor(mesh, incarnation=7, dial=1)
        mesh.pump(lambda: "b" in a.transport.connected())
        second = impostor(mesh, incarnation=7, dial=2)
        mesh.pump(first.is_closed)
        assert [event for event in a.links() if event.peer == "b"] == [Connected("b", 7), Disconnected("b"), Connected("b", 7)]
        first.send(frame(m.encode(m.TimeoutNow(1))))
        second.send(frame(m.encode(m.TimeoutNow(2))))
        mesh.pump(lambda: a.received())
        mesh.turns(5)
        assert a.received() == [("b", m.TimeoutNow(2))]


def test_any_frames_of_a_peer_end_its_link_or_are_messages(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        pair_with_raw(mesh)
        a = mesh.members["a"]
        dial = 0

        @SHARED
        @given(st.lists(st.binary(max_size=60), min_size=1, max_size=5))
        def try_frames(payloads: list[bytes]) -> None:
            nonlocal dial
            dial += 1
            raw = impostor(mesh, dial=dial)
            mesh.pump(lambda: raw.read())
            for payload in payloads:
                raw.send(frame(payload))
            mesh.turns(2)
            raw.close()
            mesh.turns(2)

        try_frames()
        mesh.talk("c", "a")
        assert "c" in a.transport.connected()


@given(st.binary(max_size=300))
def test_bytes_that_are_no_message_raise_only_what_the_transport_catches(data: bytes) -> None:
    try:
        m.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
