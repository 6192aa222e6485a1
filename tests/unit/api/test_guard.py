"""The HTTP port against clients that are slow, greedy or no clients at all. Real sockets, short limits, one server in a thread."""

from __future__ import annotations

import gc
import json
import re
import socket
import threading
import time
from typing import Any

import msgspec
import pytest

from api.guard import HttpLimits, guarded
from raftmeta.core.commands import Body as Command
from raftmeta.core.commands import RecordCheck
from raftmeta.core.types import Basis
from tests.support.api_server import SHORT, Running, declare, running, wait_until
from tests.unit.api.harness import PUBLISH, manifest


def read_all(connection: socket.socket) -> bytes:
    """Everything until the other end closes; a reset counts as an end."""
    parts = []
    try:
        while part := connection.recv(65_536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def dribble(connection: socket.socket, first: bytes, piece: bytes, stop: threading.Event) -> None:
    """Sends the bytes, then the piece every 20 ms, until told to stop or cut."""
    try:
        connection.sendall(first)
        while not stop.wait(0.02):
            connection.sendall(piece)
    except OSError:
        pass


HEAD = f"PUT {PUBLISH} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n".encode()


WHOLE = b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (b"", b"a"),
        (b"GET /livez HT", b"a"),
        (b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ", b"a"),
        (b"\r\n\r\n", b"\r\n"),
        (HEAD + b"content-length: 1000000\r\n\r\n{", b"a"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\nfffff\r\n", b"a"),
        (WHOLE + b"GET /livez HTTP/1.1\r\nx: ", b"a"),
        (WHOLE, b"\r\n"),
    ],
    ids=["silence", "request line", "header", "blank lines", "body", "chunk", "second request", "blank lines after a request"],
)
def test_a_client_that_sends_a_byte_at_a_time_is_cut_while_others_are_served(first: bytes, piece: bytes) -> None:
    with running() as server:
        connection, stop = server.connect(), threading.Event()
        sender = threading.Thread(target=dribble, args=(connection, first, piece, stop))
        sender.start()
        try:
            assert server.works()
            read_all(connection)  # returns only because the server ended it; the socket's own timeout would raise
            assert server.works()
        finally:
            stop.set()
            sender.join()
            connection.close()
        assert server.member.log.proposed == []


def test_a_connection_that_says_nothing_is_cut() -> None:
    with running() as server, server.connect() as connection:
        assert read_all(connection) == b""
        assert server.works()


def test_a_body_that_keeps_coming_at_a_fair_pace_is_no_slow_client() -> None:
    protocol = protocol_with(HttpLimits(body_s=10, body_bytes_per_s=1_000))
    protocol._head_since, protocol._body_since, protocol._body_bytes = None, 0.0, 0
    seen = []
    for now in range(0, 100, 5):  # longer than the grace, at 1,200 bytes per second
        protocol._body_bytes = 1_200 * now
        seen.append(protocol.overdue(now))
    assert not any(seen)
    assert not protocol.overdue(124)
    assert protocol.overdue(125)


def test_a_body_that_waits_for_us_is_no_slow_client() -> None:
    protocol = protocol_with(HttpLimits(body_s=10, body_bytes_per_s=1_000))
    protocol._head_since, protocol._body_since, protocol._body_bytes = None, 0.0, 0
    protocol.flow.read_paused = True
    assert not protocol.overdue(1_000)
    protocol.flow.read_paused = False
    assert not protocol.overdue(1_009)
    assert protocol.overdue(1_011)


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01\x00", b"\x00" * 100, b"GET / HTTP/9.9\r\n\r\n", b"SSH-2.0-OpenSSH_9.0\r\n", b"{}\r\n\r\n"]
)
def test_bytes_that_are_no_http_get_a_problem_and_an_end(garbage: bytes) -> None:
    with running() as server, server.connect() as connection:
        connection.sendall(garbage)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400"), head
        assert json.loads(body)["code"] == "bad_request"
        assert server.works()


def test_a_head_without_end_is_cut_at_its_limit() -> None:
    with running(HttpLimits(max_head_bytes=4_096, head_s=60)) as server, server.connect() as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nx: " + b"a" * 5_000)
        assert b"exceeds 4096 bytes" in read_all(connection)
        assert server.works()


@pytest.mark.parametrize("padding", [b"a", b" "], ids=["value", "blanks before it"])
def test_a_head_that_arrives_whole_is_held_to_the_limit_too(padding: bytes) -> None:
    with running(HttpLimits(max_head_bytes=4_096)) as server:
        for size, status in ((4_096, b"200"), (4_097, b"400")):
            head = b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\nx: "
            head += padding * (size - len(head) - 5) + b"b\r\n\r\n"
            with server.connect() as connection:
                connection.sendall(head)
                reply = read_all(connection)
                assert (len(head), reply.split()[1]) == (size, status)
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["detail"] == "the request's head exceeds 4096 bytes"
        assert server.works()


def test_a_head_behind_another_request_is_bounded() -> None:
    with running(HttpLimits(max_head_bytes=4_096)) as server, server.connect() as connection:
        connection.sendall(WHOLE + b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\nx: " + b"a" * 8_192 + b"\r\n\r\n")
        assert read_all(connection).count(b"HTTP/1.1 200") <= 1
        assert server.works()


def test_a_body_larger_than_a_head_may_be_arrives_with_it_whole() -> None:
    value = manifest()
    value["sources"] = [f"http://h{number}/" + "a" * 2_000 + "/" for number in range(8)]
    body = json.dumps({"manifest": value}).encode()
    with running(HttpLimits(max_head_bytes=4_096)) as server, server.connect() as connection:
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert len(body) > 3 * 4_096 and connection.recv(65_536).startswith(b"HTTP/1.1 201")


@pytest.mark.parametrize("field", [b"host: 127.0.0.1", b"content-length: 2", b"idempotency-key: k", b"authorization: Bearer x"])
def test_a_header_that_decides_something_may_not_stand_twice(field: bytes) -> None:
    head = b"POST /v1/rollouts/r/abort HTTP/1.1\r\nconnection: close\r\ncontent-type: application/json\r\n"
    fields = [b"host: 127.0.0.1", b"content-length: 2"]
    sent = [*fields, *([] if field in fields else [field]), field]
    with running() as server, server.connect() as connection:
        connection.sendall(head + b"\r\n".join(sent) + b"\r\n\r\n{}")
        reply, _, body = read_all(connection).partition(b"\r\n\r\n")
        assert (reply.split()[1], json.loads(body)["code"]) == (b"400", "bad_request")
        assert server.member.log.proposed == []


@pytest.mark.parametrize("path", [b"/v1/models/encoder%2Fversions%2F1.0.0", b"/v1/models/encoder/versions%2f1.0.0", b"/v1%2Fmodels"])
def test_an_encoded_slash_is_no_slash(path: bytes) -> None:
    with running(prepare=declare) as server, server.connect() as connection:
        connection.sendall(b"GET " + path + b" HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        reply, _, body = read_all(connection).partition(b"\r\n\r\n")
        assert (reply.split()[1], json.loads(body)["code"]) == (b"422", "bad_name")


def test_connections_beyond_the_limit_are_answered_and_closed() -> None:
    with running(HttpLimits(max_connections=3)) as server:
        held = [server.connect() for _ in range(3)]
        for connection in held:
            connection.sendall(b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        with server.connect() as one_more:
            head, _, body = read_all(one_more).partition(b"\r\n\r\n")
            assert (head[:12], json.loads(body)["code"]) == (b"HTTP/1.1 503", "overloaded")
        for connection in held:
            connection.close()
        wait_until(lambda: len(server.server.server_state.connections) == 0)
        assert server.works()


def test_a_client_that_reads_nothing_is_cut_and_its_watch_ends() -> None:
    with running(prepare=declare) as server, server.connect(receive_bytes=4_096) as connection:
        connection.sendall(b"GET /v1/watch?from_revision=0 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        wait_until(lambda: server.member.watch.watchers == 1)
        for number in range(500):  # 30 MB, more than the system's own buffers take
            revision = server.member.state.revision
            report = json.dumps({"text": "x" * 60_000}).encode()
            propose(server, number, RecordCheck("search", "incomplete", "", report, Basis(0, 0, "", revision, 0)))
            if server.member.watch.watchers == 0:
                break
        wait_until(lambda: server.member.watch.watchers == 0)
        assert server.works()


def propose(server: Running, number: int, body: Command) -> None:
    """Through the log alone, from another thread than the server's, as the engine does."""
    server.member.log.propose(body, f"k{number}", "ci", 1).result()


def test_a_refused_gigabyte_is_answered_while_the_client_still_sends() -> None:
    with running() as server, server.connect() as connection:
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % (1 << 30))
        for _ in range(9):  # goes on sending before it looks for an answer
            connection.sendall(b" " * 100_000)
            threading.Event().wait(0.01)
        reply = read_all(connection)
        assert reply.startswith(b"HTTP/1.1 413")
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["code"] == "body_too_large"
        assert server.works()


def test_a_client_that_asks_first_is_told_before_it_sends() -> None:
    with running() as server, server.connect() as connection:
        connection.sendall(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % (1 << 30))
        assert connection.recv(65_536).startswith(b"HTTP/1.1 413")
    with running() as server, server.connect() as connection:
        body = json.dumps({"manifest": manifest()}).encode()
        connection.sendall(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
        assert connection.recv(65_536).startswith(b"HTTP/1.1 100")
        connection.sendall(body)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 201")


def test_on_its_way_down_a_server_ends_watches_and_finishes_requests() -> None:
    with running() as server:
        watch, writer = server.connect(), server.connect()
        watch.sendall(b"GET /v1/watch HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        wait_until(lambda: server.member.watch.watchers == 1)
        server.member.log.switches.hold = True
        body = json.dumps({"manifest": manifest()}).encode()
        writer.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: bool(server.member.log._held))
        server.stop()
        wait_until(lambda: server.service.draining)
        assert read_all(watch).endswith(b"0\r\n\r\n")
        server.member.log.release()
        assert b"HTTP/1.1 201" in read_all(writer)
        with pytest.raises(OSError):
            server.connect()
        watch.close()
        writer.close()


def test_a_connection_that_is_done_is_kept_for_a_while_and_then_ended() -> None:
    with running(msgspec.structs.replace(SHORT, idle_s=0.3)) as server, server.connect() as connection:
        began = time.monotonic()
        for _ in range(2):
            connection.sendall(WHOLE)
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        assert read_all(connection) == b""  # returns only because the server ended it
        assert time.monotonic() - began >= 0.3
        assert server.works()


def test_a_request_leaves_nothing_for_the_garbage_collector() -> None:
    """Cycles that hold a whole request once cost a member a seventh of its time."""
    with running() as server, server.connect() as connection:
        connection.sendall(WHOLE)
        assert b"200 OK" in connection.recv(65_536)
        gc.collect()
        gc.disable()
        try:
            for _ in range(100):
                connection.sendall(WHOLE)
                assert b"200 OK" in connection.recv(65_536)
            assert gc.collect() < 100
        finally:
            gc.enable()


def test_requests_that_arrive_together_are_answered_in_their_order() -> None:
    missing = b"GET /v1/models/none/versions/1.0.0 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    last = WHOLE.replace(b"host:", b"connection: close\r\nhost:")
    with running() as server, server.connect() as connection:
        connection.sendall(WHOLE + missing + last)
        answers = read_all(connection)
    assert re.findall(rb"HTTP/1\.1 (\d+)", answers) == [b"200", b"404", b"200"], answers
    assert answers.count(b"connection: close") == 1


def test_a_reply_whose_header_holds_a_line_break_is_not_sent() -> None:
    protocol = protocol_with(HttpLimits())
    cycle = Cycle()
    for value in (b"a\nset-cookie: b", b"a\rb", b"\r\n\r\n"):
        with pytest.raises(ValueError, match="line break"):
            protocol._reply(cycle, 200, [(b"idempotency-key", value)], b"{}")
    assert not cycle.response_started
    assert protocol.transport.written == b""


def test_what_cannot_be_sent_at_once_goes_the_ordinary_way() -> None:
    for change in ("paused", "HEAD", "started"):
        protocol, cycle = protocol_with(HttpLimits()), Cycle()
        protocol.flow.write_paused = change == "paused"
        cycle.scope = {"method": "HEAD" if change == "HEAD" else "GET"}
        cycle.response_started = change == "started"
        assert not protocol._reply(cycle, 200, [], b"{}"), change
        assert protocol.transport.written == b"", change


def test_a_client_that_left_gets_nothing() -> None:
    protocol, cycle = protocol_with(HttpLimits()), Cycle()
    cycle.disconnected = True
    assert protocol._reply(cycle, 200, [], b"{}")
    assert protocol.transport.written == b""


class Cycle:
    """One request as uvicorn keeps it: enough to reply to."""

    default_headers = ((b"date", b"today"),)
    disconnected = response_started = response_complete = False
    keep_alive = True

    def __init__(self) -> None:
        self.scope = {"method": "GET"}


def protocol_with(limits: HttpLimits) -> Any:
    """A connection that was never made: enough to judge times."""

    class Transport:
        unread = 0

        def get_write_buffer_size(self) -> int:
            return self.unread

        def __init__(self) -> None:
            self.written = b""

        def write(self, data: bytes) -> None:
            self.written += data

    class Flow:
        read_paused = write_paused = False

    protocol: Any = object.__new__(guarded(limits))
    protocol._unread_bytes, protocol._unread_since = 0, 0.0
    protocol._head_since = protocol._body_since = protocol._idle_since = None
    protocol.transport, protocol.flow = Transport(), Flow()
    return protocol


def test_a_reader_who_takes_some_bytes_now_and_then_is_not_cut() -> None:
    protocol = protocol_with(HttpLimits(read_s=10))
    seen = []
    for now, unread in ((0, 1_000), (9, 1_000), (11, 900), (20, 900), (22, 1_500), (31, 1_500)):
        protocol.transport.unread = unread
        seen.append(protocol.overdue(now))
    assert seen == [False, False, False, False, True, True]
