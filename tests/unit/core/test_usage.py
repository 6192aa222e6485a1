"""Who needs a version: found without a walk over all deployments, and the same wherever the entry began."""

from __future__ import annotations

from raftmeta.core import commands as c
from raftmeta.core.apply import apply_batch
from raftmeta.core.handlers.checks import Refusal
from raftmeta.core.handlers.versions import delete_version
from raftmeta.core.state import DEPLOYMENT
from raftmeta.core.tables import Table
from raftmeta.core.types import Deployment
from raftmeta.core.work import Work
from tests.support.commands import NOW_MS, World, declaration, publication, serving_world


class Counting(Table[Deployment]):
    """Counts how often a deployment is looked at."""

    __slots__ = ("looks",)
    looks: int

    def get(self, key: str) -> Deployment | None:
        self.looks += 1
        return super().get(key)


def test_many_deletions_in_one_entry_look_at_the_deployments_that_may_need_the_version_and_at_no_other() -> None:
    world = World()
    for label in ("1", "2", *(f"v{number}" for number in range(50))):
        world.ok(publication("m", label))
    for number in range(20):
        world.ok(declaration(f"d{number:02}", "m"))
    world.serve("1", "r1", "d07")
    work = Work(world.state)
    table = work.serving.deployments = Counting(work.ledger, world.state.deployments, DEPLOYMENT, "deployment")
    table.looks = 0
    for number in range(50):
        work.mark()
        assert isinstance(delete_version(work, c.DeleteVersion("m", f"v{number}")), bytes)
    assert table.looks == 0
    refused = delete_version(work, c.DeleteVersion("m", "1"))
    assert isinstance(refused, Refusal) and "d07" in refused.detail
    assert table.looks == 1


def test_what_needs_a_version_is_judged_alike_wherever_entries_are_cut() -> None:
    """The need begins, moves and ends between deletions, and a refused command in between leaves nothing behind."""
    world = serving_world()
    world.ok(declaration("e", "m"))
    delete = [c.DeleteVersion("m", label) for label in ("1", "2")]
    bodies = [
        c.Activate("e", "1", None, "r1"), *delete, publication("m", "2"),
        c.AbortRollout("r1", "operator", "", ""), c.Activate("d", "2", None, "r2"), *delete,
        c.Activate("d", "3", None, "r3"), c.Activate("e", "2", None, "r4"), *delete, publication("m", "1"),
        c.AbortRollout("r2", "operator", "", ""), *delete, c.AbortRollout("r4", "operator", "", ""), *delete,
    ]  # fmt: skip
    payloads = [c.encode(c.Command(c.SCHEMA, f"k{place}", "p", "a", NOW_MS, body)) for place, body in enumerate(bodies)]
    whole = apply_batch(world.state, payloads)
    state, outcomes = world.state, []
    for payload in payloads:
        state, (outcome,), _ = apply_batch(state, (payload,))
        outcomes.append(outcome)
    assert list(whole.outcomes) == outcomes
    assert whole.state.state_hash == state.state_hash
    codes = [outcome.code for outcome in outcomes]
    assert codes[1:4] == ["in_use", "ok", "ok"] and codes[6:8] == ["ok", "in_use"] and codes[-2:] == ["unknown_version", "ok"], codes
