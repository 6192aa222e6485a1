"""The rules of hellos, as pure functions: who is refused, and that both ends of a pair keep the same connection."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmeta.log import hello as rules
from raftmeta.log.hello import Expectation, Hello, Identity, Link, Pair, PeerMemory, Refusal, Refused

U64 = st.integers(1, (1 << 64) - 1)
HELLO = Hello(protocol=rules.PROTOCOL, cluster_id="c1", member_id="b", incarnation=5, feature=1, dial=3, seen_incarnation=0, seen_dial=0)
ACCEPTING = Expectation(cluster_id="c1", local_id="a", peers=frozenset({"b", "c"}), dialled=None)


def certificate(*uris: str) -> dict[str, object]:
    return {"subject": ((("commonName", "b"),),), "subjectAltName": (("DNS", "localhost"), *(("URI", uri) for uri in uris))}


def refusal(hello: Hello, certified: Identity | None, expected: Expectation = ACCEPTING) -> Refusal | None:
    try:
        rules.check_hello(hello, certified, expected)
    except Refused as error:
        return error.reason
    return None


def test_the_identity_is_the_uri_of_the_certificate() -> None:
    assert rules.identity_of(certificate("raftmeta://c1/member/b")) == Identity("c1", "b")
    assert rules.identity_of(certificate("https://elsewhere/", "raftmeta://c1/member/b")) == Identity("c1", "b")


@pytest.mark.parametrize(
    "uris",
    [
        (),
        ("raftmeta://c1/member/b", "raftmeta://c1/member/c"),
        ("raftmeta://c1/agent/b",),
        ("raftmeta://c1/member/",),
        ("raftmeta:///member/b",),
        ("raftmeta://c1/member/b/c",),
        ("raftmeta://c1",),
    ],
)
def test_a_certificate_without_exactly_one_name_of_a_member_is_refused(uris: tuple[str, ...]) -> None:
    with pytest.raises(Refused) as caught:
        rules.identity_of(certificate(*uris))
    assert caught.value.reason is Refusal.CERTIFICATE_NAME


def test_a_certificate_without_alternative_names_is_refused() -> None:
    with pytest.raises(Refused):
        rules.identity_of({"subject": ()})


def test_a_hello_that_agrees_is_accepted() -> None:
    assert refusal(HELLO, Identity("c1", "b")) is None
    assert refusal(HELLO, Identity("c1", "b"), msgspec.structs.replace(ACCEPTING, dialled="b")) is None


@pytest.mark.parametrize(("feature", "level", "is_refused"), [(1, 0, False), (1, 1, False), (2, 1, False), (1, 2, True), (0, 1, True)])
def test_a_build_that_cannot_run_the_level_of_the_cluster_gets_no_link(feature: int, level: int, is_refused: bool) -> None:
    hello, expected = msgspec.structs.replace(HELLO, feature=feature), msgspec.structs.replace(ACCEPTING, feature=level)
    assert refusal(hello, Identity("c1", "b"), expected) is (Refusal.FEATURE_TOO_LOW if is_refused else None)


@pytest.mark.parametrize(
    ("changes", "certified", "reason"),
    [
        ({"protocol": 2}, Identity("c1", "b"), Refusal.WRONG_PROTOCOL),
        ({"cluster_id": "c2"}, Identity("c1", "b"), Refusal.WRONG_CLUSTER),
        ({"member_id": "c"}, Identity("c1", "b"), Refusal.WRONG_MEMBER),
        ({"member_id": "x"}, Identity("c1", "x"), Refusal.UNKNOWN_MEMBER),
        ({"member_id": "a"}, Identity("c1", "a"), Refusal.SELF_CONNECTION),
        ({}, Identity("c2", "b"), Refusal.WRONG_CLUSTER),
        ({}, Identity("c1", "c"), Refusal.WRONG_MEMBER),
        ({}, Identity("c1", "a"), Refusal.SELF_CONNECTION),
        ({"cluster_id": "c2"}, None, Refusal.WRONG_CLUSTER),
        ({"member_id": "x"}, None, Refusal.UNKNOWN_MEMBER),
    ],
)
def test_a_hello_that_disagrees_is_refused(changes: dict[str, object], certified: Identity | None, reason: Refusal) -> None:
    assert refusal(msgspec.structs.replace(HELLO, **changes), certified) is reason


def test_another_member_at_the_address_dialled_is_refused() -> None:
    assert refusal(HELLO, Identity("c1", "b"), msgspec.structs.replace(ACCEPTING, dialled="c")) is Refusal.WRONG_MEMBER


def test_a_dial_number_is_taken_once_and_only_upwards() -> None:
    memory = PeerMemory()
    for dial in (1, 2, 9):
        hello = msgspec.structs.replace(HELLO, dial=dial)
        rules.check_replay(hello, memory)
        memory.note(hello, inbound=True)
    for dial in (1, 8, 9):
        with pytest.raises(Refused) as caught:
            rules.check_replay(msgspec.structs.replace(HELLO, dial=dial), memory)
        assert caught.value.reason is Refusal.REPLAYED
    rules.check_replay(msgspec.structs.replace(HELLO, incarnation=6, dial=1), memory)


def test_the_answer_to_an_own_dial_leaves_no_trace_in_the_memory() -> None:
    memory = PeerMemory()
    memory.note(HELLO, inbound=False)
    assert (memory.seen_incarnation, memory.seen_dial) == (0, 0)


@given(st.integers(1, 1000), st.integers(1, 1000), U64, U64)
def test_of_two_simultaneous_dials_both_ends_keep_the_same(dial_a: int, dial_b: int, process_a: int, process_b: int) -> None:
    """Each end holds its own dial and judges the other's hello, which was sent before the holder's dial was seen."""
    from_a = Hello(rules.PROTOCOL, "c1", "a", process_a, 1, dial_a, process_b, dial_b - 1)
    from_b = Hello(rules.PROTOCOL, "c1", "b", process_b, 1, dial_b, process_a, dial_a - 1)
    a_takes_b = rules.replaces(Link(False, process_b, dial_a), Link(True, process_b, dial_b), from_b, Pair("a", process_a, "b"))
    b_takes_a = rules.replaces(Link(False, process_a, dial_b), Link(True, process_a, dial_a), from_a, Pair("b", process_b, "a"))
    assert (a_takes_b, b_takes_a) == (False, True), "the smaller id's dial lives on both ends"


@given(st.integers(1, 1000), st.integers(0, 1000))
def test_a_peer_that_saw_our_dial_and_dials_again_has_lost_it(dial: int, later: int) -> None:
    hello = msgspec.structs.replace(HELLO, seen_incarnation=77, seen_dial=dial + later)
    held, candidate = Link(False, 5, dial), Link(True, 5, 3)
    assert rules.replaces(held, candidate, hello, Pair("a", 77, "b"))
    other_process = msgspec.structs.replace(hello, seen_incarnation=78)
    assert not rules.replaces(held, candidate, other_process, Pair("a", 77, "b")), "what it saw of a former process says nothing"


def test_a_new_incarnation_replaces_whatever_is_held() -> None:
    for held in (Link(True, 5, 9), Link(False, 5, 9)):
        for candidate in (Link(True, 6, 1), Link(False, 6, 1)):
            assert rules.replaces(held, candidate, HELLO, Pair("a", 1, "b"))


def test_a_later_connection_of_the_same_opener_replaces_the_earlier() -> None:
    assert rules.replaces(Link(True, 5, 3), Link(True, 5, 4), HELLO, Pair("a", 1, "b"))


@given(st.binary(max_size=200))
def test_bytes_that_are_no_hello_raise_only_what_the_transport_catches(data: bytes) -> None:
    try:
        rules.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return


def test_a_number_that_does_not_fit_is_no_hello() -> None:
    shapes: list[object] = [
        [rules.HELLO_TAG, 1, "c1", "b", -1.5, 1, 1, 0, 0],
        [rules.HELLO_TAG, 1],
        [1, 1, "c1", "b", 5, 1, 1, 0, 0],
        {},
        7,
    ]
    for bad in shapes:
        with pytest.raises(msgspec.DecodeError):
            rules.decode(msgspec.msgpack.encode(bad))
