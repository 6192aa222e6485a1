"""The working copy takes back exactly what a command did, wherever the record stood before."""

from __future__ import annotations

import gc

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as hs

from raftmeta.core import commands as c
from raftmeta.core.apply import apply_batch
from raftmeta.core.commands import DeleteVersion
from raftmeta.core.handlers.checks import result
from raftmeta.core.handlers.versions import delete_version, publish
from raftmeta.core.rollout import sides
from raftmeta.core.state import State
from raftmeta.core.tables import UNKNOWN
from raftmeta.core.types import Stage, Verdict
from raftmeta.core.work import Work
from tests.support.commands import NOW_MS, attestation, check_state, declaration, publication, serving_world, snapshot
from tests.support.state_hash import recompute_hash

KEYS = ("d", "e", "f")
steps = hs.lists(hs.tuples(hs.sampled_from(KEYS), hs.sampled_from(["put", "delete"]), hs.integers(0, 9)), max_size=8)


def run(work: Work, changes: list[tuple[str, str, int]]) -> None:
    for key, what, number in changes:
        if what == "put":
            work.verdicts.put(key, Verdict(key, "consistent", b"x" * number, "p", number, number))
        elif work.verdicts.get(key) is not None:
            work.verdicts.delete(key)


def seen(work: Work) -> tuple[object, ...]:
    return [work.verdicts.get(key) for key in KEYS], work.verdicts.count, work.ledger.size_bytes, list(work.ledger.events)  # type: ignore[return-value]


@settings(max_examples=60, deadline=None)
@given(steps, steps, steps, hs.booleans())
def test_undo_takes_back_what_was_done_since_the_mark(before: list, kept: list, undone: list, settles: bool) -> None:  # type: ignore[type-arg]
    """With a command that the quota bounds, sizes are settled before it and after it."""
    first = Work(State.empty())
    run(first, before)
    state = first.finish()
    work, plain = Work(state), Work(state)
    for each in (work, plain):
        each.mark()
        run(each, kept)
    if settles:
        work.ledger.settle()
    mark, expected = work.mark(), seen(work)
    run(work, undone)
    if settles:
        work.ledger.settle()
    work.ledger.revision += 3
    work.undo(mark)
    assert seen(work) == expected
    after, wanted = work.finish(), plain.finish()
    assert after.state_hash == recompute_hash(after)
    assert None not in after.verdicts.values()
    assert (dict(after.verdicts), after.state_hash, after.size_bytes) == (dict(wanted.verdicts), wanted.state_hash, wanted.size_bytes)


def test_undo_takes_back_new_models_versions_and_histories() -> None:
    world = serving_world()
    world.serve("1", "r1")
    work = Work(world.state)
    mark = work.mark()
    body = publication("n", "1")
    assert isinstance(publish(work, body), bytes)
    work.history.put("d", ("r1", "r2"))
    work.history.put("e", ("r3",))
    assert work.history.get("d") == ("r1", "r2")
    work.undo(mark)
    assert (work.catalog.model_count, work.catalog.model("n"), work.catalog.version("n/1")) == (1, None, None)
    assert (work.history.get("d"), work.history.get("e")) == (("r1",), ())
    after = work.finish()
    check_state(after)
    assert snapshot(after) == snapshot(world.state)


def test_a_batch_leaves_nothing_for_the_cycle_collector() -> None:
    """The collector runs when it likes and would hold the interpreter lock; a cycle per batch was seen to cost a tenth of apply."""
    world = serving_world()
    world.serve("1", "r1")
    gc.collect()
    gc.disable()
    try:
        for number in range(5):
            world.ok(publication("m", f"x{number}"))
            world.refused("bad_name", publication("m", "/"))
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.garbage.clear()
        gc.collect()
        assert not [each for each in gc.garbage if type(each).__module__.startswith("raftmeta")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_a_version_whose_publication_was_taken_back_can_be_published_in_the_same_batch() -> None:
    world = serving_world()
    work = Work(world.state)
    mark = work.mark()
    assert isinstance(publish(work, publication("m", "3")), bytes)
    work.undo(mark)
    work.mark()
    assert publish(work, publication("m", "3")) == result(created=1, number=3)
    after = work.finish()
    check_state(after)
    assert [label for _, label, _ in after.versions_of("m")] == ["1", "2", "3"]


def test_a_deletion_that_was_taken_back_leaves_the_version_in_its_place() -> None:
    world = serving_world()
    work = Work(world.state)
    mark = work.mark()
    assert isinstance(delete_version(work, DeleteVersion("m", "1")), bytes)
    assert work.catalog.version("m/1") is None
    work.undo(mark)
    assert work.catalog.version("m/1") is world.state.versions["m/1"]
    assert isinstance(publish(work, publication("m", "3")), bytes)
    after = work.finish()
    check_state(after)
    assert [label for _, label, _ in after.versions_of("m")] == ["1", "2", "3"]


def test_a_deletion_of_what_came_in_the_same_batch_can_be_taken_back() -> None:
    world = serving_world()
    work = Work(world.state)
    assert publish(work, publication("m", "3")) == result(created=1, number=3)
    mark = work.mark()
    assert isinstance(delete_version(work, DeleteVersion("m", "3")), bytes)
    work.undo(mark)
    after = work.finish()
    check_state(after)
    assert [label for _, label, _ in after.versions_of("m")] == ["1", "2", "3"]


def test_a_record_that_many_commands_of_an_entry_change_is_encoded_when_its_size_is_asked_for() -> None:
    work = Work(State.empty())
    for number in range(100):
        work.mark()
        work.verdicts.put("d", Verdict("d", "consistent", b"x" * number, "p", number, number))
    entry = work.verdicts.changed["d"]
    assert (entry.image, entry.size_bytes, work.ledger.size_bytes) == (b"", UNKNOWN, 0)
    work.ledger.settle()
    settled = work.verdicts.changed["d"]
    assert settled.size_bytes == work.ledger.size_bytes == len(settled.image) + 1
    work.ledger.settle()
    assert work.verdicts.changed["d"] is settled
    check_state(work.finish())


def test_the_quota_counts_what_the_commands_before_it_in_the_entry_wrote() -> None:
    """Attestations pass it and make the rollout larger; what is declared or published behind them then does not fit."""
    world = serving_world()
    world.start("1", "r1")
    rollout = world.rollout("r1")
    bodies: list[c.Body] = [attestation(rollout, node, side, Stage.PREPARED) for node, side in sides(world.state.deployments["d"]).items()]
    bodies += [
        publication("m", "3"),
        declaration("e", "m"),
        declaration("f", "m"),
        c.AbortRollout("r1", "operator", "", ""),
        declaration("g", "m"),
    ]
    payloads = [c.encode(c.Command(c.SCHEMA, f"k{place}", "p", "a", NOW_MS, body)) for place, body in enumerate(bodies)]
    codes = set()
    for room in range(0, 3_000, 60):
        limits = msgspec.structs.replace(world.state.limits, quota_bytes=world.state.size_bytes + room)
        first = state = msgspec.structs.replace(world.state, limits=limits)
        outcomes = []
        for payload in payloads:
            state, (outcome,), _ = apply_batch(state, (payload,))
            outcomes.append(outcome)
        whole = apply_batch(first, payloads)
        assert (list(whole.outcomes), whole.state.state_hash, whole.state.size_bytes) == (outcomes, state.state_hash, state.size_bytes)
        check_state(whole.state)
        codes.add(tuple(outcome.code for outcome in outcomes[3:6]))
    assert len(codes) >= 3, codes
