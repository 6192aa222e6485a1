"""Feature levels among members: where a new cluster begins, and who may not be left behind."""

from __future__ import annotations

import msgspec
import pytest

from raftmeta.core.commands import RaiseFeatureLevel
from raftmeta.core.types import DrainOverdue, Policy
from tests.support.commands import declaration
from tests.support.trio import Box, Trio

CANCEL = msgspec.structs.replace(declaration(), policy=Policy(drain_overdue=DrainOverdue.CANCEL))


def levels(trio: Trio) -> dict[str, int]:
    return {name: box.replica.state.feature_level for name, box in trio.boxes.items()}


def all_at(trio: Trio, level: int) -> bool:
    return set(levels(trio).values()) == {level}


def asked(trio: Trio, box: Box, body: object, key: str) -> tuple[str, str]:
    results = trio.propose(box, body, key)  # type: ignore[arg-type]
    assert trio.run(5.0, lambda: bool(results))
    outcome = results[0].outcome
    assert outcome is not None, results
    return outcome.code, outcome.detail


def test_a_new_cluster_begins_at_the_highest_level_that_all_its_members_can_run() -> None:
    trio = Trio(features={"m1": 2, "m2": 2, "m3": 2})
    assert trio.run(10.0, lambda: all_at(trio, 2))
    assert trio.leader().replica.state.revision == 1


def test_a_new_cluster_with_one_member_of_an_earlier_build_begins_where_that_one_can_follow() -> None:
    trio = Trio(features={"m1": 2, "m2": 2})
    trio.leader()
    trio.run(3.0)
    assert all_at(trio, 1)


def test_a_cluster_that_was_written_to_is_not_raised_by_itself() -> None:
    trio = Trio(features={"m1": 2, "m2": 2})
    assert trio.write(trio.leader(), "1").code == "ok"
    trio.features["m3"] = 2
    trio.boot("m3", trio.stop("m3"))
    trio.run(5.0)
    assert all_at(trio, 1)
    assert asked(trio, trio.leader(), RaiseFeatureLevel(2), "raise") == ("ok", "")
    assert trio.run(3.0, lambda: all_at(trio, 2))


@pytest.mark.parametrize("away", [False, True], ids=["an earlier build", "away"])
def test_a_leader_raises_no_level_that_was_forwarded_while_a_member_cannot_follow(away: bool) -> None:
    trio = Trio(features={"m1": 2, "m2": 2, "m3": 2 if away else 1})
    leader = trio.leader()
    assert leader.name != "m3"
    if away:  # before anything was written: it does not begin at level 2 either
        trio = Trio(features={"m1": 2, "m2": 2, "m3": 1})
        leader = trio.leader()
        assert trio.write(leader, "1").code == "ok"
        trio.stop("m3")
        trio.run(0.1)
    follower = next(box for name, box in trio.boxes.items() if name not in (leader.name, "m3"))
    code, detail = asked(trio, follower, RaiseFeatureLevel(2), "raise")
    assert code == "feature_level_unsupported"
    assert ("without a link: m3" if away else "m3 (up to 1)") in detail
    assert follower.replica.state.feature_level == 1


def test_a_new_leader_that_may_not_know_yet_that_the_level_was_raised_refuses_nothing_for_good() -> None:
    trio = Trio(features={"m1": 2, "m2": 2})
    leader = trio.leader()
    assert trio.write(leader, "1").code == "ok"
    follower = next(box for box in trio.boxes.values() if box is not leader)
    own_entry = leader.replica.engine._noop_index
    leader.replica.engine._noop_index = own_entry + 1_000  # it has not applied what came before it
    early = trio.propose(follower, CANCEL, "early")
    assert trio.run(5.0, lambda: bool(early))
    assert early[0].code == "no_leader", "to be asked again"
    leader.replica.engine._noop_index = own_entry
    assert asked(trio, follower, CANCEL, "late")[0] == "unsupported_command"


def test_a_leader_lets_no_field_into_the_log_that_a_member_of_an_earlier_build_would_not_see() -> None:
    trio = Trio(features={"m1": 2, "m2": 2})
    leader = trio.leader()
    assert trio.write(leader, "1").code == "ok"
    code, detail = asked(trio, trio.follower(), CANCEL, "declare")
    assert code == "unsupported_command"
    assert "feature level 2" in detail
    trio.features["m3"] = 2
    trio.boot("m3", trio.stop("m3"))
    trio.run(1.0)
    assert asked(trio, trio.leader(), RaiseFeatureLevel(2), "raise")[0] == "ok"
    assert asked(trio, trio.follower(), CANCEL, "again")[0] == "ok"
