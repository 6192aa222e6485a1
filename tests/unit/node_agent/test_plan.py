"""The plan of one deployment, against a small world that obeys it: one node, its slots, and a control plane that moves rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node_agent.device.port import SlotState
from node_agent.plan import (
    NO_ORDER,
    Attest,
    AwaitWorkers,
    Change,
    Decline,
    Fetch,
    Goal,
    Obey,
    Order,
    Pinned,
    Plan,
    Seen,
    SlotSeen,
    StageInto,
    Step,
    SwitchTo,
    Target,
    Verify,
    Warm,
    converged,
    is_behind,
    plan,
)
from raftmeta.core.types import Phase, SideName, Stage


def target(number: int) -> Target:
    return Target("encoder", f"{number}.0.0", f"{number:064x}", f"{number + 1000:064x}")


V1, V2, V3 = target(1), target(2), target(3)


def goal(committed: Target | None, order: Order = NO_ORDER, change: Change | None = None, offline: bool = False) -> Goal:
    return Goal("search", SideName.PRIMARY, committed, order, change, offline=offline)


def slot(held: Target | None, *, checked: bool = True, loaded: bool = True, state: SlotState = SlotState.VERIFIED) -> SlotSeen:
    return SlotSeen() if held is None else SlotSeen(held.label, held.checksum, state, checked, loaded)


def seen(first: SlotSeen, second: SlotSeen, active: int | None, **fields: object) -> Seen:
    base = Seen((first, second), active, None, frozenset(), NO_ORDER, None, "", None)
    return base._replace(**fields)  # type: ignore[arg-type]


def test_nothing_is_done_while_nothing_is_committed_and_no_rollout_runs() -> None:
    assert plan(goal(None), seen(slot(None), slot(None), None)).steps == ()


def test_a_cold_node_fetches_stages_warms_switches_and_asks_its_workers() -> None:
    order = Order(1, 9)
    steps = plan(goal(V1, order), seen(slot(None), slot(None), None)).steps
    assert steps == (Fetch(V1), StageInto(V1, 0), Warm(V1, 0), SwitchTo(V1, 0, order), AwaitWorkers(V1))


def test_a_converged_node_has_nothing_to_do() -> None:
    order = Order(1, 9)
    at_rest = seen(slot(V1), slot(None), 0, answering=V1, fence=order, obeyed=V1)
    assert plan(goal(V1, order), at_rest).steps == ()
    assert converged(goal(V1, order), at_rest)


def test_memory_that_another_process_verified_is_verified_again_before_it_serves() -> None:
    steps = plan(goal(V1, Order(1, 9)), seen(slot(V1, checked=False), slot(None), None)).steps
    assert steps == (Verify(V1, 0), SwitchTo(V1, 0, Order(1, 9)), AwaitWorkers(V1))


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.SYNCING])
def test_a_version_that_a_slot_holds_is_made_ready_at_once(phase: Phase) -> None:
    order, change = Order(1, 9), Change("r", phase, V1, None)
    at_rest = seen(slot(V1, checked=False), slot(V2), 1, answering=V2, fence=order, obeyed=V2, prepared=frozenset([V1.checksum]))
    assert plan(goal(V2, order, change), at_rest).steps == (Verify(V1, 0), Attest("r", Stage.READY, V1))
    without_blobs = at_rest._replace(prepared=frozenset())
    assert plan(goal(V2, order, change), without_blobs).steps[0] == Fetch(V1)


def test_an_older_order_is_refused_and_takes_no_step() -> None:
    made = plan(goal(V1, Order(1, 5)), seen(slot(V2), slot(V1), 0, answering=V2, fence=Order(1, 9), obeyed=V2))
    assert made.steps == ()
    assert "older" in made.refused


def test_an_order_of_an_earlier_generation_is_refused_whatever_its_revision() -> None:
    made = plan(goal(V1, Order(1, 500)), seen(slot(V2), slot(V1), 0, answering=V2, fence=Order(2, 9), obeyed=V2))
    assert made.steps == () and made.refused


def test_the_same_order_with_other_bytes_is_refused() -> None:
    made = plan(goal(V1, Order(1, 9)), seen(slot(V2), slot(V1), 0, answering=V2, fence=Order(1, 9), obeyed=V2))
    assert made.steps == () and "before" in made.refused


def test_a_higher_order_for_what_serves_already_raises_the_fence_without_a_switch() -> None:
    steps = plan(goal(V1, Order(2, 3)), seen(slot(V1), slot(None), 0, answering=V1, fence=Order(1, 9), obeyed=V1)).steps
    assert steps == (Obey(V1, Order(2, 3)),)


def test_what_a_node_remembers_is_served_without_regard_to_the_fence() -> None:
    at_start = seen(slot(V1, checked=False), slot(None), None, fence=Order(1, 9), obeyed=V2)
    made = plan(goal(V1, Order(1, 9), offline=True), at_start)
    assert not made.refused
    assert made.steps[-2:] == (SwitchTo(V1, 0, Order(1, 9)), AwaitWorkers(V1))


def test_equal_bytes_under_another_label_are_staged_again_so_that_answers_carry_the_right_label() -> None:
    renamed = V1._replace(label="1.0.1")
    made = plan(goal(renamed, Order(1, 9)), seen(slot(V1), slot(None), 0, prepared=frozenset([V1.checksum])))
    assert made.steps[0] == StageInto(renamed, 1)


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.SYNCING])
def test_a_rollout_that_failed_here_is_attested_once_and_then_left_alone(phase: Phase) -> None:
    change = Change("r-1", phase, V2, Stage.PREPARED)
    at_rest = seen(slot(V1), slot(None), 0, answering=V1, fence=Order(1, 9), obeyed=V1, failed_change="r-1")
    assert plan(goal(V1, Order(1, 9), change), at_rest).steps == (Attest("r-1", Stage.FAILED, V2),)
    said = at_rest._replace(said=Stage.FAILED)
    assert plan(goal(V1, Order(1, 9), change), said).steps == ()


PINNED = Pinned(V1, "audit")


def test_a_pinned_version_serves_on_whatever_is_ordered_and_the_order_is_named() -> None:
    at_rest = seen(slot(V1), slot(V2), 0, answering=V1, fence=Order(1, 9), obeyed=V1, pinned=PINNED)
    made = plan(goal(V2, Order(1, 12)), at_rest)
    assert made.steps == () and made.refused == "1.0.0 is pinned here (audit): the order for 2.0.0 is not obeyed"
    assert plan(goal(V1, Order(1, 9)), at_rest) == Plan(()), "while it is what is ordered there is nothing to say"


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.SYNCING])
def test_a_rollout_to_another_version_fails_where_one_is_pinned(phase: Phase) -> None:
    change = Change("r-1", phase, V2, None)
    at_rest = seen(slot(V1), slot(None), 0, answering=V1, fence=Order(1, 9), obeyed=V1, pinned=PINNED)
    assert plan(goal(V1, Order(1, 9), change), at_rest).steps == (Decline(V2, "r-1", PINNED),)
    declined = at_rest._replace(failed_change="r-1")
    assert plan(goal(V1, Order(1, 9), change), declined).steps == (Attest("r-1", Stage.FAILED, V2),)


def test_a_rollout_to_the_pinned_version_goes_on_where_it_is_pinned() -> None:
    at_rest = seen(slot(V1), slot(None), 0, answering=V1, fence=Order(1, 9), obeyed=V1, pinned=PINNED, prepared=frozenset([V1.checksum]))
    change = Change("r-1", Phase.PREPARING, V1, None)
    assert plan(goal(V1, Order(1, 9), change), at_rest).steps == (Attest("r-1", Stage.PREPARED, V1),)
    decided = Change("r-1", Phase.COMMITTING, V1, Stage.READY)
    assert plan(goal(V1, Order(1, 12), decided), at_rest).steps == (Attest("r-1", Stage.ACTIVE, V1),)


def test_pinned_memory_that_is_gone_is_brought_back_whatever_is_ordered() -> None:
    gone = seen(slot(None), slot(None), None, fence=Order(1, 9), obeyed=V1, pinned=PINNED)
    made = plan(goal(V2, Order(1, 12)), gone)
    assert made.steps == (Fetch(V1), StageInto(V1, 0), Warm(V1, 0), SwitchTo(V1, 0, Order(1, 12)), AwaitWorkers(V1))


def test_preparing_leaves_the_undo_version_in_its_slot() -> None:
    change = Change("r-1", Phase.PREPARING, V3, None)
    at_rest = seen(slot(V2), slot(V1), 0, answering=V2, fence=Order(1, 9), obeyed=V2)
    assert plan(goal(V2, Order(1, 9), change), at_rest).steps == (Fetch(V3), Attest("r-1", Stage.PREPARED, V3))


def test_a_roll_back_to_a_slot_that_holds_the_version_copies_nothing() -> None:
    change = Change("r-1", Phase.SYNCING, V1, Stage.PREPARED)
    at_rest = seen(slot(V2), slot(V1, checked=False, loaded=False), 0, answering=V2, fence=Order(1, 9), obeyed=V2)
    steps = plan(goal(V2, Order(1, 9), change), at_rest._replace(prepared=frozenset([V1.checksum]))).steps
    assert steps == (Verify(V1, 1), Warm(V1, 1), Attest("r-1", Stage.READY, V1))


def test_a_cold_node_in_the_middle_of_a_rollout_serves_first_and_prepares_beside() -> None:
    change = Change("r-1", Phase.SYNCING, V2, Stage.PREPARED)
    steps = plan(goal(V1, Order(1, 9), change), seen(slot(None), slot(None), None)).steps
    staged = [step for step in steps if isinstance(step, StageInto)]
    assert staged == [StageInto(V1, 0), StageInto(V2, 1)]
    assert steps.index(AwaitWorkers(V1)) < steps.index(StageInto(V2, 1))


def test_only_more_than_the_switch_itself_makes_a_node_count_as_behind() -> None:
    ready = seen(slot(V1), slot(V2), 0, answering=V1, fence=Order(1, 9), obeyed=V1)
    assert not is_behind(plan(goal(V2, Order(1, 12)), ready))
    assert is_behind(plan(goal(V3, Order(1, 12)), ready))
    assert not is_behind(plan(goal(V1, Order(1, 9)), ready))


# --- a world that obeys the plan


@dataclass
class World:
    """One node. What `crash` keeps is what is on the disk, in shared memory, or with the control plane."""

    slots: list[SlotSeen] = field(default_factory=lambda: [SlotSeen(), SlotSeen()])
    active: int | None = None
    store: set[str] = field(default_factory=set)
    fence: Order = NO_ORDER
    obeyed: Target | None = None
    answering: Target | None = None
    committed: Target | None = None
    order: Order = NO_ORDER
    change: Change | None = None
    switches: list[tuple[Target, Order]] = field(default_factory=list)

    def goal(self) -> Goal:
        return goal(self.committed, self.order, self.change)

    def seen(self) -> Seen:
        held = {item.checksum for item in self.slots if item.state is SlotState.VERIFIED}
        prepared = frozenset(self.store | held)
        return Seen((self.slots[0], self.slots[1]), self.active, self.answering, prepared, self.fence, self.obeyed, "", None)

    def take(self, step: Step) -> None:
        match step:
            case Fetch(wanted):
                self.store.add(wanted.checksum)
            case StageInto(wanted, at):
                assert at != self.active, "a step wrote to the active slot"
                assert wanted.checksum in self.seen().prepared, "staged what is not there"
                self.slots[at] = slot(wanted, loaded=False)
            case Verify(_, at):
                self.slots[at] = self.slots[at]._replace(checked=True)
            case Warm(wanted, at):
                assert self.slots[at].holds(wanted)
                self.slots[at] = self.slots[at]._replace(loaded=True)
            case SwitchTo(wanted, at, order):
                held = self.slots[at]
                assert held.holds(wanted) and held.checked and held.loaded, "switched to memory that was not proven"
                assert order >= self.fence, "obeyed an older order"
                self.fence, self.obeyed = order, wanted
                self.active, self.answering = at, None
                self.switches.append((wanted, order))
            case AwaitWorkers(wanted):
                assert self.active is not None and self.slots[self.active].holds(wanted)
                self.answering = wanted
            case Obey(wanted, order):
                assert order > self.fence
                self.fence, self.obeyed = order, wanted
            case Attest(_, stage, _):
                assert self.change is not None
                self.attest(stage)

    def attest(self, stage: Stage) -> None:
        """The control plane records it and moves the rollout when its gate holds; this node is the only one."""
        assert self.change is not None
        change = self.change._replace(attested=stage)
        if stage is Stage.PREPARED and change.phase is Phase.PREPARING:
            change = change._replace(phase=Phase.SYNCING)
        elif stage is Stage.READY:
            held = [item for item in self.slots if item.holds(change.to)]
            assert held and held[0].checked and held[0].loaded, "attested ready without proof"
            change = change._replace(phase=Phase.COMMITTING)
            self.committed, self.order = change.to, Order(self.order.generation, self.order.revision + 3)
        elif stage is Stage.ACTIVE:
            assert self.answering == change.to, "attested active before every worker answered with it"
            self.change = None
            return
        self.change = change

    def crash(self, whole_machine: bool) -> None:
        """Control ends; with the whole machine the memory goes too."""
        self.answering = None
        self.slots = [item._replace(checked=False, loaded=item.loaded and not whole_machine) for item in self.slots]
        if whole_machine:
            self.slots, self.active = [SlotSeen(), SlotSeen()], None
            if self.change is not None:
                self.change = self.change._replace(attested=None)

    def settle(self, limit: int = 60) -> None:
        for _ in range(limit):
            steps = plan(self.goal(), self.seen()).steps
            if not steps:
                return
            self.take(steps[0])
        raise AssertionError(f"no rest after {limit} steps: {plan(self.goal(), self.seen())}")


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("activate"), st.integers(1, 4)),
        st.tuples(st.just("steps"), st.integers(1, 6)),
        st.tuples(st.just("crash"), st.integers(0, 1)),
        st.tuples(st.just("supervisor"), st.just(0)),
        st.tuples(st.just("abort"), st.just(0)),
        st.tuples(st.just("recover"), st.integers(1, 4)),
        st.tuples(st.just("lose worker"), st.integers(0, 1)),
        st.tuples(st.just("tear"), st.integers(0, 1)),
    ),
    max_size=25,
)


@settings(max_examples=300, deadline=None)
@given(ACTIONS)
def test_from_any_crash_point_the_node_comes_to_rest_where_it_should_be(actions: list[tuple[str, int]]) -> None:
    world = World(order=Order(1, 1))
    for action, number in actions:
        match action:
            case "activate" if world.change is None and world.committed != target(number):
                world.change = Change(f"r-{number}", Phase.PREPARING, target(number), None)
            case "steps":
                for _ in range(number):
                    steps = plan(world.goal(), world.seen()).steps
                    if steps:
                        world.take(steps[0])
            case "crash":
                world.crash(whole_machine=bool(number))
            case "supervisor":
                world.crash(whole_machine=False)
                world.active = None
            case "abort" if world.change is not None and world.change.phase is not Phase.COMMITTING:
                world.change = None
            case "recover":  # a forced recovery: another generation, perhaps another decision, no rollout
                world.committed, world.change = target(number), None
                world.order = Order(world.order.generation + 1, max(0, world.order.revision - number))
            case "lose worker":
                world.slots[number] = world.slots[number]._replace(loaded=False)
            case "tear" if number != world.active:  # a crash inside staging
                world.slots[number] = world.slots[number]._replace(state=SlotState.DIRTY)
    world.settle()
    if world.committed is not None:
        assert converged(world.goal(), world.seen())
        assert world.fence == world.order
    assert world.change is None
    orders = [order for _, order in world.switches]
    assert orders == sorted(orders)


def test_every_step_may_be_taken_twice() -> None:
    world = World(order=Order(1, 1))
    world.change = Change("r-1", Phase.PREPARING, V1, None)
    for _ in range(40):
        steps = plan(world.goal(), world.seen()).steps
        if not steps:
            break
        world.take(steps[0])
        if not isinstance(steps[0], Attest | SwitchTo | Obey):
            before = (list(world.slots), world.active, set(world.store), world.answering)
            if isinstance(steps[0], StageInto):
                before[0][steps[0].slot] = slot(V1, loaded=False)
            world.take(steps[0])
            assert before == (list(world.slots), world.active, set(world.store), world.answering)
    assert converged(world.goal(), world.seen())
