"""Who is wrong when states differ, and who decides it."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmeta.log.integrity import MAX_REVISIONS, Comparison, Verdict

A, B, C = b"\x0a" * 32, b"\x0b" * 32, b"\x0c" * 32
THREE, FIVE = ("m1", "m2", "m3"), ("m1", "m2", "m3", "m4", "m5")


def compared(own: bytes | None, **others: bytes) -> Comparison:
    found = Comparison("m1")
    if own is not None:
        found.note("m1", 1_000, own)
    for member, state_hash in others.items():
        found.note(member, 1_000, state_hash)
    return found


@pytest.mark.parametrize(
    ("own", "others", "verdict"),
    [
        (A, {}, Verdict.EQUAL),
        (A, {"m2": A}, Verdict.EQUAL),
        (A, {"m2": A, "m3": A}, Verdict.EQUAL),
        (None, {"m2": A, "m3": B}, Verdict.EQUAL),
        (A, {"m2": B}, Verdict.UNDECIDED),
        (A, {"m2": A, "m3": B}, Verdict.PEER),
        (A, {"m2": B, "m3": B}, Verdict.SELF),
        (A, {"m2": B, "m3": C}, Verdict.UNDECIDED),
    ],
)
def test_a_majority_of_three_decides(own: bytes | None, others: dict[str, bytes], verdict: Verdict) -> None:
    assert compared(own, **others).judge(1_000, THREE, 2).verdict is verdict


def test_of_five_two_against_two_is_no_majority_and_three_are() -> None:
    found = compared(A, m2=B, m3=B, m4=A)
    assert found.judge(1_000, FIVE, 3).verdict is Verdict.UNDECIDED
    found.note("m5", 1_000, B)
    assert found.judge(1_000, FIVE, 3).verdict is Verdict.SELF


def test_reports_of_strangers_count_for_nothing() -> None:
    assert compared(A, x1=B, x2=B, x3=B).judge(1_000, THREE, 2).verdict is Verdict.EQUAL


def test_while_one_member_is_set_aside_no_second_one_is() -> None:
    found = compared(A, m2=B, m3=B, m4=B)
    assert found.judge(1_000, FIVE, 3).verdict is Verdict.SELF
    found.note("m5", 2_000, B, sound=False)
    assert found.judge(1_000, FIVE, 3).verdict is Verdict.WAITS
    found.note("m5", 2_000, B)  # it caught up
    assert found.judge(1_000, FIVE, 3).verdict is Verdict.SELF


def test_of_two_that_a_majority_contradicts_the_first_by_name_goes_first() -> None:
    def judged_by(name: str, *, one_at_a_time: bool = True) -> Comparison:
        found = Comparison(name, one_at_a_time)
        for member, state_hash in {"m1": A, "m2": B, "m3": B, "m4": C, "m5": B}.items():
            found.note(member, 1_000, state_hash)
        return found

    first, second = judged_by("m1"), judged_by("m4")
    assert first.judge(1_000, FIVE, 3).verdict is Verdict.SELF
    assert second.judge(1_000, FIVE, 3).verdict is Verdict.WAITS
    assert judged_by("m2").judge(1_000, FIVE, 3).verdict is Verdict.PEER
    assert judged_by("m4", one_at_a_time=False).judge(1_000, FIVE, 3).verdict is Verdict.SELF
    for member in ("m2", "m3", "m5"):
        second.note(member, 1_100, B)
    second.note("m4", 1_100, C)
    assert second.judge(1_100, FIVE, 3).verdict is Verdict.WAITS  # the first one is silent: it may be setting itself aside
    second.forget("m1")  # it is back, and has not said how
    assert second.judge(1_000, FIVE, 3).verdict is Verdict.WAITS
    second.note("m1", 2_000, B, sound=False)
    assert second.judge(1_000, FIVE, 3).verdict is Verdict.WAITS
    second.note("m1", 2_000, B)
    assert second.judge(1_000, FIVE, 3).verdict is Verdict.SELF


def test_nobody_waits_for_a_member_that_has_been_away_for_long() -> None:
    found = compared(A, m2=B, m3=B, m4=B)
    found.forget("m5")
    assert found.judge(1_000, FIVE, 3).verdict is Verdict.WAITS
    assert found.judge(1_000, FIVE, 3, absent={"m5"}).verdict is Verdict.SELF
    second = Comparison("m4")
    for member, state_hash in {"m1": A, "m2": B, "m3": B, "m4": C, "m5": B}.items():
        second.note(member, 1_000, state_hash)
    assert second.judge(1_000, FIVE, 3).verdict is Verdict.WAITS
    assert second.judge(1_000, FIVE, 3, absent={"m1"}).verdict is Verdict.SELF


def test_a_member_that_waits_for_its_turn_is_contradicted_and_not_undecided() -> None:
    found = compared(A, m2=B, m3=B, m4=B)
    found.forget("m5")
    found.judge(1_000, FIVE, 3)
    assert not found.undecided


def test_what_a_member_said_before_it_was_set_aside_counts_no_more() -> None:
    found = compared(A, m2=A, m3=B)
    assert found.judge(1_000, THREE, 2).verdict is Verdict.PEER
    found.forget("m3")
    found.note("m3", 2_000, B, sound=False)
    assert found.judge(1_000, THREE, 2).verdict is Verdict.EQUAL


def test_what_a_member_said_before_it_had_caught_up_is_no_news_when_it_comes_late() -> None:
    found = compared(A, m2=B, m3=B, m4=B)
    found.forget("m5")  # it began again
    found.note("m5", 1_000, B)
    found.note("m5", 1_000, B, sound=False)
    assert found.judge(1_000, FIVE, 3).verdict is Verdict.SELF
    found.forget("m5")
    found.note("m5", 1_000, B, sound=False)
    assert found.judge(1_000, FIVE, 3).verdict is Verdict.WAITS


def test_a_member_that_came_back_is_judged_by_what_it_says_from_then_on() -> None:
    found = compared(A, m2=A, m3=B)
    found.forget("m3")
    assert found.judge(1_000, THREE, 2).verdict is Verdict.EQUAL
    found.note("m3", 1_000, B)
    assert found.judge(1_000, THREE, 2).verdict is Verdict.PEER


def test_what_no_majority_decided_stays_open_until_one_agrees_there_or_later() -> None:
    found = compared(A, m2=B)
    found.judge(1_000, THREE, 2)
    assert found.undecided
    found.note("m1", 1_500, A)
    found.note("m3", 1_500, A)
    assert found.judge(1_500, THREE, 2).verdict is Verdict.EQUAL
    assert not found.undecided


def test_agreement_at_an_earlier_revision_settles_nothing_later() -> None:
    found = compared(A, m2=B)
    found.judge(1_000, THREE, 2)
    found.note("m1", 900, A)
    found.note("m3", 900, A)
    found.judge(900, THREE, 2)
    assert found.undecided


def test_one_report_alone_settles_nothing() -> None:
    found = compared(A, m2=B)
    found.judge(1_000, THREE, 2)
    found.note("m1", 1_500, A)
    found.judge(1_500, THREE, 2)
    assert found.undecided


def test_memory_is_bounded_and_the_newest_are_kept() -> None:
    found = Comparison("m1")
    for revision in range(1, 3 * MAX_REVISIONS):
        found.note("m1", revision, A)
        found.note("m2", revision, B)
        found.judge(revision, THREE, 2)
    assert found.own_at(1) is None
    assert found.own_at(3 * MAX_REVISIONS - 1) == A
    assert len(found._undecided) <= MAX_REVISIONS


def test_revisions_that_nobody_reached_drive_out_only_what_the_member_that_named_them_had_said() -> None:
    found = compared(A, m2=B, m3=B)
    for number in range(10 * MAX_REVISIONS):
        found.note("m2", (1 << 40) + number, C)
    assert found.own_at(1_000) == A and found.heard_at(1_000) == {"m1", "m3"}
    assert found.judge(1_000, THREE, 2).verdict is Verdict.UNDECIDED and found.undecided
    found.note("m2", 1_100, B)  # what it says after that counts as before
    found.note("m1", 1_100, A)
    found.note("m3", 1_100, B)
    assert found.judge(1_100, THREE, 2).verdict is Verdict.SELF
    assert all(len(reports) <= MAX_REVISIONS for reports in found._reports.values())


@given(st.lists(st.sampled_from([A, B, C]), min_size=3, max_size=5))
def test_at_most_a_minority_finds_itself_wrong_and_every_order_of_reports_says_the_same(hashes: list[bytes]) -> None:
    members = FIVE[: len(hashes)]
    quorum = len(hashes) // 2 + 1
    wrong = []
    for member in members:
        verdicts = set()
        for order in list(permutations(range(len(hashes))))[:24]:
            found = Comparison(member)
            for place in order:
                found.note(members[place], 7, hashes[place])
            verdicts.add(found.judge(7, members, quorum).verdict)
        assert len(verdicts) == 1
        wrong += [member] if verdicts == {Verdict.SELF} else []
    assert len(wrong) <= len(hashes) - quorum
    assert all(hashes.count(hashes[members.index(member)]) < quorum for member in wrong)
