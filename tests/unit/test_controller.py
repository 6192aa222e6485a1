"""The controller's clock: phases are timed by what the leader saw, not by what wall clocks stamped."""

from __future__ import annotations

from raftmeta.controller import seen_since
from raftmeta.core.commands import AbortRollout, Activate, DeclareDeployment
from raftmeta.core.rollout import decide
from raftmeta.core.state import State
from raftmeta.core.types import Phase, Policy, Side
from tests.support.trio import Trio

HOUR_MS = 3_600_000


def preparing(trio: Trio) -> State:
    trio.write(trio.leader(), "v1")
    declare = DeclareDeployment("d", "m", Side("a", ("n1",)), None, Policy(prepare_timeout_ms=HOUR_MS // 2, sync_timeout_ms=HOUR_MS // 2))
    for key, body in (("k1", declare), ("k2", Activate("d", "v1", None, "r1"))):
        results = trio.propose(trio.leader(), body, key)
        assert trio.run(3.0, lambda results=results: bool(results)) and results[0].code == "ok"  # type: ignore[misc]
    return trio.leader().replica.state


def test_a_wall_clock_that_jumps_an_hour_ends_no_rollout() -> None:
    trio = Trio()
    state = preparing(trio)
    seen = seen_since({}, state, 1_000)
    trio.wall_offset_ms = HOUR_MS
    trio.write(trio.leader(), "v2")
    state = trio.leader().replica.state
    seen = seen_since(seen, state, 5_000)
    assert decide(state, 5_000, (), {rollout: since for rollout, (_, since) in seen.items()}) == []
    (late,) = decide(state, 1_000 + HOUR_MS, (), {rollout: since for rollout, (_, since) in seen.items()})
    assert isinstance(late, AbortRollout) and late.code == "preparing_timeout"


def test_a_wall_clock_that_jumps_does_not_move_the_stamps_of_a_leader_and_they_still_rise() -> None:
    trio = Trio()
    trio.write(trio.leader(), "v1")
    before = trio.leader().replica.state.cluster_ms
    for offset, label in ((HOUR_MS, "v2"), (-HOUR_MS, "v3")):
        trio.wall_offset_ms = offset
        trio.write(trio.leader(), label)
        after = trio.leader().replica.state.cluster_ms
        assert before < after < before + 60_000
        before = after


def test_a_phase_is_timed_from_when_it_was_first_seen_and_anew_in_the_next_phase() -> None:
    state = preparing(Trio())
    seen = seen_since({}, state, 10)
    assert seen == {"r1": (Phase.PREPARING, 10)}
    assert seen_since(seen, state, 99) == seen
    assert seen_since({"r1": (Phase.SYNCING, 10)}, state, 99) == {"r1": (Phase.PREPARING, 99)}
    assert seen_since(seen, State.empty(), 99) == {}
