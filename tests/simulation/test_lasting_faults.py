"""Faults that stay for minutes: leadership hardly moves, and clients go on being answered."""

from __future__ import annotations

import pytest

from raftmeta.log.guard import Rules
from tests.simulation.lasting import LastingFault, Seen

SLOW_SYNC_S = 0.15


def cut_between(roles: str, lasts_s: float, rules: Rules | None = None) -> Seen:
    """Two of the three do not hear each other, the third hears both."""
    world = LastingFault(lasts_s, rules=rules)

    def begin() -> None:
        first, second = world.followers()
        world.cut([(world.leader(), first) if roles == "leader and follower" else (first, second)])

    return world.watch(begin)


def test_ten_minutes_in_which_a_follower_does_not_hear_the_leader_but_the_other_follower_move_no_leadership_and_writes_go_on() -> None:
    seen = cut_between("leader and follower", 600.0)
    assert seen.leader_changes <= 2
    assert seen.longest_gap_s < 10.0, seen


def test_two_minutes_in_which_two_followers_do_not_hear_each_other_move_no_leadership_and_writes_go_on() -> None:
    seen = cut_between("followers", 120.0)
    assert seen.leader_changes == 0
    assert seen.longest_gap_s < 10.0, seen


def test_without_a_pre_vote_the_same_partial_partition_moves_leadership_again_and_again() -> None:
    assert cut_between("leader and follower", 60.0, Rules(pre_vote=False)).leader_changes > 10


@pytest.mark.parametrize("whose", ["the leader's", "a follower's", "everyone's"])
def test_syncs_of_150_ms_for_two_minutes_change_the_leader_once_at_most_and_writes_go_on(whose: str) -> None:
    world = LastingFault(120.0)

    def begin() -> None:
        slow = {
            "the leader's": [world.leader()],
            "a follower's": world.followers()[:1],
            "everyone's": list(world.members.values()),
        }[whose]
        world.slow_syncs = {member.id: SLOW_SYNC_S for member in slow}

    seen = world.watch(begin)
    assert seen.leader_changes <= 1
    assert seen.longest_gap_s < 10.0, seen


def test_a_member_that_was_cut_off_for_ten_minutes_deposes_nobody_when_it_is_back() -> None:
    world = LastingFault(600.0)
    terms: list[int] = []

    def begin() -> None:
        leader, away = world.leader(), world.followers()[0]
        assert leader.replica is not None
        terms.append(leader.replica.engine.term)
        world.cut([(away, other) for other in world.members.values() if other is not away])

    seen = world.watch(begin)
    assert seen.leader_changes == 0 and seen.longest_gap_s < 10.0, seen
    leader = world.leader()  # after the calm in which it was back
    assert leader.replica is not None
    assert world.invariants.leader_changes == 1 and leader.replica.engine.term == terms[0]
