"""A member of several counts as compared once a majority had its state at one revision; before that nothing is known of it."""

from __future__ import annotations

import msgspec
import pytest

from raftmeta.log.exchange import ExchangeSettings
from raftmeta.log.messages import StateReport
from raftmeta.log.reports import REPORT_S
from tests.support.trio import Box, Trio


def restarted_behind(trio: Trio) -> Box:
    """A follower that missed some writes and hears the others again, but no report yet."""
    follower = trio.follower()
    disk = trio.stop(follower.name)
    for number in range(5):
        trio.write(trio.leader(), f"missed-{number}")
    return trio.boot(follower.name, disk)


def test_a_restarted_member_is_not_compared_before_it_heard_anybody_at_its_revision_and_is_soon_after() -> None:
    trio = Trio()
    trio.write(trio.leader(), "v1")
    again = restarted_behind(trio)
    trio.drop = lambda sender, receiver, message: isinstance(message, StateReport) and again.name in (sender, receiver)
    trio.run(REPORT_S * 1.5)
    assert again.replica.state.state_hash == trio.leader().replica.state.state_hash, "it has caught up, and what it holds is right"
    assert not again.replica.compared, "but nobody has looked"
    trio.drop = lambda sender, receiver, message: False
    assert trio.run(REPORT_S + 1.0, lambda: again.replica.compared)


@pytest.mark.parametrize("busy", [False, True], ids=["at rest", "while writes go on"])
def test_a_restarted_member_is_compared_within_a_second_at_any_load(busy: bool) -> None:
    """Under writes the others are never at its own revision when they say theirs: it compares when it comes there."""
    trio = Trio()
    trio.write(trio.leader(), "v1")
    again = restarted_behind(trio)
    for number in range(20 if busy else 0):
        trio.write(trio.leader(), f"busy-{number}")
        if again.replica.compared:
            break
    assert trio.run(0.0 if busy else 1.0, lambda: again.replica.compared)


def test_a_member_with_another_state_after_its_start_never_counts_as_compared() -> None:
    trio = Trio()
    trio.write(trio.leader(), "v1")
    again = restarted_behind(trio)
    state = again.replica.state
    again.replica.state = msgspec.structs.replace(state, hash_sum=state.hash_sum ^ 1)
    assert trio.run(5.0, lambda: "set aside" in again.told or again.replica.compared)
    assert not again.replica.compared


def test_members_of_a_new_cluster_compare_themselves_as_soon_as_it_has_formed() -> None:
    trio = Trio()
    trio.leader()
    assert trio.run(1.0, lambda: all(box.replica.compared for box in trio.boxes.values()))


def test_a_member_that_hears_less_than_a_majority_at_its_revision_is_not_compared() -> None:
    names = ("m1", "m2", "m3", "m4", "m5")
    trio = Trio(names=names)
    trio.write(trio.leader(), "v1")
    again = restarted_behind(trio)
    friend = next(name for name in names if name != again.name)
    trio.drop = lambda sender, receiver, message: (
        isinstance(message, StateReport) and again.name in (sender, receiver) and friend not in (sender, receiver)
    )
    trio.run(REPORT_S * 1.5)
    assert again.replica.state.state_hash == trio.leader().replica.state.state_hash
    assert not again.replica.compared


def test_a_state_that_came_as_a_snapshot_is_compared_anew() -> None:
    trio = Trio(exchange=ExchangeSettings(entries=5, keep_entries=0), segment_bytes=32 << 10)
    trio.write(trio.leader(), "v1")
    follower = trio.follower()
    assert trio.run(1.0, lambda: follower.replica.compared)
    others = [name for name in trio.boxes if name != follower.name]
    trio.cut = {pair for name in others for pair in ((name, follower.name), (follower.name, name))}
    for number in range(60):
        trio.write(trio.leader(), f"x{number}")
    trio.cut = set()
    seen: list[bool] = []
    assert trio.run(10.0, lambda: seen.append(follower.replica.compared) is None and "replaced" in follower.told)
    assert seen[-1] is False, "what was compared is gone"
    assert trio.run(REPORT_S + 1.0, lambda: follower.replica.compared)


def test_a_member_alone_has_nobody_to_compare_with() -> None:
    trio = Trio(names=("m1",))
    assert trio.boxes["m1"].replica.compared
