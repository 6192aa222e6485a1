"""A keeper and its clients in one process: what is handed out, what is refused, and that each bound holds."""

from __future__ import annotations

import errno
import mmap
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from node_agent.device import keeper_messages as messages
from node_agent.device.keeper import Holdings, Keeper
from node_agent.device.keeper_client import KeeperClient
from node_agent.device.keeper_messages import MAX_BYTES, MAX_HELD, Answer, Given, Hold, List, Listing, Open, Refused, Release
from node_agent.device.memory_maker import MemfdMaker, Memory
from node_agent.refusal import Refusal
from raftmeta.core.errors import ErrorClass
from tests.support.keeping import keeping

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[KeeperClient]:
    with keeping(tmp_path / "keeper.sock") as made:
        yield made


@contextmanager
def watched_descriptor() -> Iterator[tuple[int, Callable[[], bool]]]:
    """A descriptor to pass on, and whether nobody but this test holds it: the other end of its pipe then has ended."""
    end, passed = os.pipe()
    os.set_blocking(end, False)

    def is_closed() -> bool:
        os.close(passed)
        try:
            return os.read(end, 1) == b""
        except BlockingIOError:
            return False

    try:
        yield passed, is_closed
    finally:
        os.close(end)


def raw_connection(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(5)
    connection.connect(str(path))
    return connection


def test_one_name_is_one_memory_for_everybody(client: KeeperClient) -> None:
    first, second = client.hold("a", 100), client.open("a")
    assert second is not None
    assert (first.created, second.created) == (True, False)
    assert first.size_bytes == second.size_bytes == PAGE, "whole pages"
    with mmap.mmap(first.descriptor, PAGE) as one, mmap.mmap(second.descriptor, PAGE) as other:
        one[:5] = b"hello"
        assert other[:5] == b"hello"
    again = client.hold("a", 100)
    assert not again.created
    for descriptor in (first.descriptor, second.descriptor, again.descriptor):
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)


def test_what_is_not_held_is_not_made_by_asking_for_it(client: KeeperClient) -> None:
    assert client.open("a") is None
    assert client.list().held == ()


def test_released_memory_is_gone_from_the_keeper_and_stays_with_who_maps_it(client: KeeperClient) -> None:
    held = client.hold("a", PAGE)
    with mmap.mmap(held.descriptor, PAGE) as mapped:
        os.close(held.descriptor)
        mapped[:5] = b"hello"
        assert client.release("a") and not client.release("a")
        assert client.open("a") is None and client.list().held == ()
        assert mapped[:5] == b"hello"
    fresh = client.hold("a", PAGE)
    with mmap.mmap(fresh.descriptor, PAGE) as mapped:
        assert fresh.created and mapped[:5] == bytes(5)
    os.close(fresh.descriptor)


def test_a_listing_says_what_is_held_and_how_much_there_may_be(client: KeeperClient) -> None:
    for name, size in (("a", PAGE), ("b", 2 * PAGE)):
        os.close(client.hold(name, size).descriptor)
    assert client.list() == Listing((messages.Held("a", PAGE), messages.Held("b", 2 * PAGE)), 64 * PAGE)


def test_the_same_name_with_another_size_is_refused_and_keeps_what_it_had(client: KeeperClient) -> None:
    os.close(client.hold("a", PAGE).descriptor)
    with pytest.raises(Refusal, match=f"memory_differs.*expected {2 * PAGE} bytes, found {PAGE} bytes") as caught:
        client.hold("a", 2 * PAGE)
    assert caught.value.error_class is ErrorClass.REJECTED
    assert [item.size_bytes for item in client.list().held] == [PAGE]


def test_more_bytes_than_the_keeper_may_hold_are_refused_with_the_numbers(client: KeeperClient) -> None:
    os.close(client.hold("a", 60 * PAGE).descriptor)
    with pytest.raises(Refusal, match=f"no_headroom.*expected {5 * PAGE} bytes, found {4 * PAGE} bytes left"):
        client.hold("b", 5 * PAGE)
    assert [item.name for item in client.list().held] == ["a"]
    os.close(client.hold("b", 4 * PAGE).descriptor)


def test_more_allocations_than_a_listing_can_name_are_refused(tmp_path: Path) -> None:
    holdings = Holdings(MemfdMaker(), 1 << 40)
    for number in range(MAX_HELD):
        assert isinstance(holdings.answer(Hold(f"{number:064d}", 1))[0], Given)
    refused, descriptor = holdings.answer(Hold("one-more", 1))
    assert isinstance(refused, Refused) and (refused.kind, descriptor) == ("no_headroom", None)
    listing, _ = holdings.answer(List())
    assert len(msgspec.msgpack.encode(listing)) <= MAX_BYTES
    holdings.let_go()


def test_memory_cannot_be_shrunk_under_those_who_map_it(client: KeeperClient) -> None:
    held = client.hold("a", 2 * PAGE)
    for size in (PAGE, 3 * PAGE):
        with pytest.raises(PermissionError):
            os.truncate(held.descriptor, size)
    os.close(held.descriptor)


def test_a_maker_without_room_is_a_refusal_and_nothing_is_held() -> None:
    class Full(MemfdMaker):
        def make(self, name: str, size: int) -> Memory:
            raise Refusal("no_headroom", name, f"{size} bytes", "0 bytes")

    holdings = Holdings(Full(), 64 * PAGE)
    assert holdings.answer(Hold("a", 1)) == (Refused("no_headroom", "a", f"{PAGE} bytes", "0 bytes"), None)
    assert holdings.answer(List())[0] == Listing((), 64 * PAGE)


def test_letting_go_closes_every_descriptor() -> None:
    holdings = Holdings(MemfdMaker(), 64 * PAGE)
    descriptors = [holdings.answer(Hold(name, 1))[1] for name in "abc"]
    holdings.answer(Release("b"))
    holdings.let_go()
    for descriptor in descriptors:
        assert descriptor is not None
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


# --- strangers and bounds


def test_another_users_process_gets_no_word_and_no_memory(tmp_path: Path) -> None:
    with keeping(tmp_path / "keeper.sock", user=os.geteuid() + 1) as client:
        with pytest.raises(Refusal, match="keeper_unavailable"):
            client.hold("a", PAGE)
        with raw_connection(tmp_path / "keeper.sock") as stranger:
            assert stranger.recv(100) == b""


def test_a_client_takes_no_memory_from_another_users_keeper(client: KeeperClient) -> None:
    with pytest.raises(Refusal, match=r"keeper_unavailable.*a keeper of user 12345, found one of user"):
        KeeperClient(client.path, user=12345).open("a")


def test_the_socket_is_nobody_elses(tmp_path: Path) -> None:
    with keeping(tmp_path / "keeper.sock"):
        assert (tmp_path / "keeper.sock").stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "keeper.sock.lock").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "packet",
    [
        b"\x00",
        b"x" * (MAX_BYTES + 1),
        msgspec.msgpack.encode(Hold("../a", 1)),
        msgspec.msgpack.encode(Hold("a\n", 1)),
        msgspec.msgpack.encode(Hold("a" * 65, 1)),
        msgspec.msgpack.encode(Hold("a", 0)),
        msgspec.msgpack.encode(Hold("a", 1 << 62)),
        msgspec.msgpack.encode(Open("")),
        msgspec.msgpack.encode({"type": "Hold", "name": "a", "size_bytes": 1, "more": 1}),
        msgspec.msgpack.encode(messages.NotHeld("a")),
    ],
)
def test_what_is_no_request_ends_its_connection_and_no_other(client: KeeperClient, tmp_path: Path, packet: bytes) -> None:
    with raw_connection(tmp_path / "keeper.sock") as good, raw_connection(tmp_path / "keeper.sock") as bad:
        bad.send(packet)
        assert bad.recv(100) == b""
        messages.send(good, List())
        assert messages.receive_answer(good) == (Listing((), 64 * PAGE), None)
    assert client.list().held == ()


def test_a_descriptor_that_comes_with_a_request_is_not_kept(client: KeeperClient, tmp_path: Path) -> None:
    with raw_connection(tmp_path / "keeper.sock") as connection, watched_descriptor() as (descriptor, is_closed):
        messages.send(connection, List(), descriptor)
        assert isinstance(messages.receive_answer(connection)[0], Listing)
        assert is_closed()


def test_of_too_many_connections_the_oldest_gives_way(tmp_path: Path) -> None:
    path = tmp_path / "keeper.sock"
    with keeping(path, max_connections=2), raw_connection(path) as first, raw_connection(path) as second, raw_connection(path) as third:
        for held in (second, third):
            messages.send(held, List())
            assert isinstance(messages.receive_answer(held)[0], Listing)
        assert first.recv(100) == b""


def test_a_keeper_without_a_descriptor_left_takes_that_of_its_oldest_connection_and_ends_only_without_any(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "keeper.sock", Holdings(MemfdMaker(), PAGE))

    class Empty(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            raise OSError(errno.EMFILE, "Too many open files")

    with raw_connection(tmp_path / "keeper.sock") as first:
        keeper.serve_ready(5)
        real, keeper._listener = keeper._listener, Empty(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        keeper._accept()
        assert first.recv(100) == b""
        with pytest.raises(OSError, match="Too many open files"):
            keeper._accept()
        keeper._listener.close()
        keeper._listener = real
    keeper.close()


def test_whoever_does_not_take_his_answers_loses_his_connection_alone(client: KeeperClient, tmp_path: Path) -> None:
    with raw_connection(tmp_path / "keeper.sock") as deaf:
        deaf.settimeout(5)
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            for _ in range(100_000):
                messages.send(deaf, List())
    assert client.list().held == ()


# --- answers that are none


@pytest.mark.parametrize(
    ("answer", "descriptors"),
    [(Given("a", 1, True), 0), (Listing((), 1), 1), (Given("a", 1, True), 2), (Given("a", 1, True), 5)],
)
def test_an_answer_whose_descriptors_do_not_fit_is_refused_and_leaks_none(answer: Answer, descriptors: int) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other, watched_descriptor() as (descriptor, is_closed):
        socket.send_fds(one, [msgspec.msgpack.encode(answer)], [descriptor] * descriptors)
        with pytest.raises(ValueError, match="descriptors with"):
            messages.receive_answer(other)
        assert is_closed()


def test_a_keeper_that_is_not_there_or_says_nothing_is_unavailable_within_the_limit(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="keeper_unavailable"):
        KeeperClient(tmp_path / "none.sock").list()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(tmp_path / "silent.sock"))
        silent.listen()
        with pytest.raises(Refusal, match=r"keeper_unavailable.*an answer within 0.05 s"):
            KeeperClient(tmp_path / "silent.sock", timeout_s=0.05).list()


def test_a_second_keeper_on_the_same_socket_is_refused_and_the_first_one_goes_on(client: KeeperClient, tmp_path: Path) -> None:
    os.close(client.hold("a", PAGE).descriptor)
    with pytest.raises(Refusal, match="keeper_in_use"):
        Keeper(tmp_path / "keeper.sock", Holdings(MemfdMaker(), PAGE))
    assert [item.name for item in client.list().held] == ["a"]
