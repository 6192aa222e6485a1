"""D4, the way back: a member whose disk was full is ready again once there is room, and not before."""

from __future__ import annotations

from raftmeta.log.exchange import ExchangeSettings
from raftmeta.log.shortage import LOOK_S
from tests.support.trio import Box, Trio, publish

ALARM, OVER = "alarm disk_full", "alarm over disk_full"


def alarms(box: Box) -> list[str]:
    """What the member was told about its disk, without repeats."""
    told = [what for what in box.told if what in (ALARM, OVER)]
    return [what for what, before in zip(told, ["", *told], strict=False) if what != before]


def test_d4_a_leader_that_refused_for_want_of_room_takes_its_alarm_back_when_room_returns_without_another_write() -> None:
    trio = Trio(segment_bytes=32 << 10, capacities={"m1": 320 << 10})
    full = trio.leader()
    for number in range(900):
        if trio.leader() is not full:
            break
        results = trio.propose(full, publish(f"v{number}"), f"k{number}")
        assert trio.run(5.0, lambda results=results: bool(results))
    assert trio.leader() is not full
    trio.rest(5 * LOOK_S)
    assert alarms(full) == [ALARM]
    full.disk.capacity_bytes = None
    trio.rest(5 * LOOK_S)
    assert alarms(full) == [ALARM, OVER]


def test_d4_a_snapshot_that_found_no_room_is_taken_when_room_returns_and_not_some_thousand_entries_later() -> None:
    trio = Trio(exchange=ExchangeSettings(entries=20_000, journal_bytes=20_000))
    box = trio.leader()
    box.disk.capacity_bytes = box.disk.used_bytes()
    for number in range(120):
        trio.write(box, f"v{number}")
    assert alarms(box) == [ALARM] and box.replica.snapshot_index == 0
    trio.rest(5 * LOOK_S)
    assert alarms(box) == [ALARM]
    box.disk.capacity_bytes = None
    trio.rest(5 * LOOK_S)
    assert alarms(box) == [ALARM, OVER]
    assert box.replica.snapshot_index > 0


def test_a_member_with_room_says_nothing_of_its_disk() -> None:
    trio = Trio()
    for number in range(30):
        trio.write(trio.leader(), f"v{number}")
    trio.rest(5 * LOOK_S)
    assert [alarms(box) for box in trio.boxes.values()] == [[], [], []]


def test_d4_when_no_majority_has_room_the_leader_refuses_says_so_and_goes_on_when_one_has() -> None:
    trio = Trio(segment_bytes=32 << 10, capacities=dict.fromkeys(("m2", "m3"), 320 << 10))
    leader = trio.leader()
    assert leader.name == "m1"
    codes = []
    for number in range(900):
        results = trio.propose(leader, publish(f"v{number}"), f"k{number}", timeout_s=2.0)
        assert trio.run(5.0, lambda results=results: bool(results)), "every command ends"
        codes.append(results[0].code)
        if codes[-1] == "disk_full":
            break
    assert set(codes) <= {"ok", "unknown_outcome", "disk_full"} and codes[-1] == "disk_full"
    last = leader.journal.last_index
    for _ in range(5):
        results = trio.propose(leader, publish("refused"), "refused")
        assert trio.run(2.0, lambda results=results: bool(results)) and results[0].code == "disk_full"
    for _ in range(2):
        known, other = trio.propose(leader, publish("v0"), "k0"), trio.propose(leader, publish("v1"), "k0")
        assert trio.run(2.0, lambda known=known, other=other: bool(known and other))
        assert known[0].outcome is not None and (known[0].code, known[0].outcome.code, known[0].outcome.repeated) == ("ok", "ok", True)
        assert other[0].outcome is not None and other[0].outcome.code == "idempotency_reused"
    assert leader.journal.last_index == last, "nothing is appended that nobody could commit"
    assert [alarms(box) for box in trio.boxes.values()] == [[ALARM]] * 3, "each says it of itself, the leader of its majority"
    trio.boxes["m3"].disk.capacity_bytes = None
    trio.rest(5 * LOOK_S)
    assert trio.write(leader, "after").code == "ok"
    trio.rest(5 * LOOK_S)
    assert alarms(leader) == alarms(trio.boxes["m3"]) == [ALARM, OVER]
    assert alarms(trio.boxes["m2"]) == [ALARM]
