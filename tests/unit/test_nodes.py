"""The table of heartbeats: ages by the own clock, bounds, and when a node may be called missing."""

from __future__ import annotations

import msgspec
import pytest

from raftmeta import nodes
from raftmeta.core.errors import RaftmetaError
from raftmeta.nodes import NodeLimits, NodeStatus, NodeTable, ServingStatus, SlotStatus


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000

    def __call__(self) -> int:
        return self.now


def status(node: str = "n1", boot_id: str = "b1") -> NodeStatus:
    slot = SlotStatus("search", "a", "1.0.0", "0" * 64, "verified")
    serving = ServingStatus("1.0.0", "0" * 64, "0" * 64, True, 84)
    return NodeStatus(node, "zone-a", boot_id, "http://n1:8500", (slot,), {"search": serving})


def test_a_node_grows_old_by_the_members_own_clock() -> None:
    clock = Clock()
    table = NodeTable(clock)
    table.record(status())
    clock.now += 7_000
    assert [(view.status.node, view.age_ms, view.missing) for view in table.views()] == [("n1", 7_000, False)]
    clock.now += 1
    assert [view.missing for view in table.views()] == [True]
    table.record(status(boot_id="b2"))
    assert [(view.status.boot_id, view.age_ms, view.missing) for view in table.views()] == [("b2", 0, False)]


def test_a_heartbeat_that_another_member_heard_counts_like_the_own() -> None:
    clock = Clock()
    table = NodeTable(clock)
    assert table.absorb(nodes.encode(status("n2")))
    assert [view.status for view in table.views()] == [status("n2")]


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"node": "UPPER"}), b"\xff" * 100])
def test_gossip_that_cannot_be_read_changes_nothing(data: bytes) -> None:
    table = NodeTable(Clock())
    assert not table.absorb(data)
    assert table.views() == ()


def test_nodes_are_listed_by_name_whatever_order_they_came_in() -> None:
    table = NodeTable(Clock())
    for node in ("n3", "n1", "n2", "n1"):
        table.record(status(node))
    assert [view.status.node for view in table.views()] == ["n1", "n2", "n3"]


def test_a_new_leader_calls_nobody_missing_before_it_has_listened_for_two_intervals() -> None:
    clock = Clock()
    table = NodeTable(clock)
    table.record(status("n1"))
    clock.now += 100_000
    led_since = clock.now
    clock.now += 3_999
    assert table.missing(("n1",), led_since) == frozenset()
    clock.now += 1
    assert table.missing(("n1",), led_since) == {"n1"}


def test_a_node_that_was_never_heard_is_missing_only_after_its_time() -> None:
    clock = Clock()
    table = NodeTable(clock)
    clock.now += 7_000
    assert table.missing(("n1", "n2"), 0) == frozenset()
    clock.now += 1
    table.record(status("n2"))
    assert table.missing(("n1", "n2"), 0) == {"n1"}


def test_only_expected_nodes_are_called_missing() -> None:
    clock = Clock()
    table = NodeTable(clock)
    table.record(status("retired"))
    clock.now += 20_000
    assert table.missing((), 0) == frozenset()


def test_a_node_that_is_gone_for_a_day_is_forgotten() -> None:
    clock = Clock()
    table = NodeTable(clock)
    table.record(status("n1"))
    clock.now += 86_400_000
    table.record(status("n2"))
    assert len(table.views()) == 2
    clock.now += 1
    assert [view.status.node for view in table.views()] == ["n2"]


def test_the_table_is_bounded_and_a_known_node_always_finds_its_place() -> None:
    clock = Clock()
    table = NodeTable(clock, NodeLimits(max_nodes=2))
    table.record(status("n1"))
    table.record(status("n2"))
    with pytest.raises(RaftmetaError) as refused:
        table.record(status("n3"))
    assert refused.value.code == "too_many_requests"
    assert not table.absorb(nodes.encode(status("n3")))
    table.record(status("n1", "b2"))
    assert [view.status.boot_id for view in table.views()] == ["b2", "b1"]
    clock.now += 86_400_001
    table.record(status("n3"))
    assert [view.status.node for view in table.views()] == ["n3"]


def test_a_heartbeat_too_large_for_one_message_is_refused() -> None:
    large = msgspec.structs.replace(status(), slots=tuple(SlotStatus("d" * 128, "s" * 64, "1" * 128, "0" * 64, "x") for _ in range(1_000)))
    with pytest.raises(RaftmetaError) as refused:
        nodes.encode(large)
    assert refused.value.code == "bad_field"


def test_who_asks_for_some_nodes_gets_those_that_were_heard_with_their_age() -> None:
    clock = Clock()
    table = NodeTable(clock)
    for node in ("n1", "n2", "n3"):
        table.record(status(node))
    clock.now += 7_001
    table.record(status("n3"))
    found = table.views_of(["n3", "n1", "never"])
    assert {node: (view.age_ms, view.missing) for node, view in found.items()} == {"n1": (7_001, True), "n3": (0, False)}
