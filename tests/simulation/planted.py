"""Defects that can be switched on, one at a time, to see that the simulation would notice them.

Each is a protection taken out or a mistake made on purpose, in the real code, for the length of a run. `find` runs seeds until something
breaks. `python -m tests.simulation --planted` runs them all and prints which seed found each; one that stays unseen in its budget fails.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import msgspec

from raftmeta import codec
from raftmeta.core.outcomes import Draft
from raftmeta.core.state import MODULUS_MASK, OUTCOME, State, leaf
from raftmeta.core.work import Work
from raftmeta.log import proposals as proposals_module
from raftmeta.log import recovery, replication
from raftmeta.log.configuration import Configuration
from raftmeta.log.engine import Engine
from raftmeta.log.guard import Rules
from raftmeta.log.hard_state import HardStateFile
from raftmeta.log.leadership import Elections
from raftmeta.log.messages import VoteReply
from raftmeta.log.progress import Progress
from raftmeta.log.proposals import Pending, Proposals
from raftmeta.log.reads import Reads
from raftmeta.log.replica import Replica
from raftmeta.log.segment import Segment
from tests.simulation.cluster import Cluster, Plan
from tests.simulation.network import SimNetwork
from tests.support.memory_disk import MemoryDisk

Switch = Callable[[], AbstractContextManager[Any]]


class Plant(msgspec.Struct, frozen=True):
    name: str
    row: str  # of the hardening page, or what it protects
    rules: Rules = Rules()
    switch: Switch = contextlib.nullcontext
    plan: dict[str, Any] = {}  # fields of the run's plan that bring the defect to light sooner
    budget: int = 40  # seeds


class Found(msgspec.Struct, frozen=True):
    seed: int  # 0: unseen within the budget
    tried: int
    what: str


def find(plant: Plant, first: int = 1, budget: int = 0) -> Found:
    """Run seeds from `first` on until something breaks."""
    budget = budget or plant.budget
    for seed in range(first, first + budget):
        fields = {"members": 5 if seed % 4 == 0 else 3, "rules": plant.rules, "stormy_s": 20.0, "calm_s": 18.0, "rate": 10.0, **plant.plan}
        with plant.switch():
            try:
                Cluster(Plan(seed, **fields)).run()
            except Exception as broken:  # noqa: BLE001 - whatever it breaks, it was noticed
                return Found(seed, seed - first + 1, f"{type(broken).__name__}: {broken}")
    return Found(0, budget, "")


def _replace(target: Any, name: str, value: Any) -> Switch:
    return lambda: patch.object(target, name, value)


def _around(target: Any, name: str, wrapper: Callable[..., Any]) -> Switch:
    """`wrapper(original, *arguments)` in place of a function."""

    def switch() -> AbstractContextManager[Any]:
        original = getattr(target, name)

        def planted(*arguments: Any, **named: Any) -> Any:
            return wrapper(original, *arguments, **named)

        return patch.object(target, name, planted)

    return switch


def _all(*switches: Switch) -> Switch:
    @contextlib.contextmanager
    def together() -> Iterator[None]:
        with ExitStack() as stack:
            for switch in switches:
                stack.enter_context(switch())
            yield

    return together


def _stored(wrapper: Callable[..., Any]) -> Switch:
    """Around both ways in which term and vote reach the disk."""
    return _all(_around(HardStateFile, "write", wrapper), _around(HardStateFile, "write_settled", wrapper))


def _nothing(*arguments: Any, **named: Any) -> None:
    """In place of something that should have been done."""


def _without_deadline(proposals: Proposals, index: int, term: int, waiting: list[Pending]) -> None:
    proposals.inflight[index] = made = proposals_module._Entry(term, waiting)
    made.deadline = proposals_module.NEVER


def _acknowledge_first(original: Any, replica: Any, transmit: Any) -> None:
    if replica._outbox:
        outbox, replica._outbox = replica._outbox, []
        transmit(outbox)
    original(replica, transmit)


def _twice(original: Any, engine: Any) -> None:
    original(engine)
    original(engine)


def _forgotten_vote(original: Any, hard: Any, promise: Any, segments: Any) -> None:
    original(hard, msgspec.structs.replace(promise, voted_for=""), segments)


def _forgotten_term(original: Any, hard: Any, promise: Any, segments: Any) -> None:
    known = hard.state.promise.term
    voted_for = promise.voted_for if promise.term == known else ""
    original(hard, msgspec.structs.replace(promise, term=known, voted_for=voted_for), segments)


def _without_outcomes(original: Any, state: Any) -> Iterator[bytes]:
    forgotten = sum(leaf(OUTCOME, key, record) for key, record in state.outcomes.items())
    rest = msgspec.structs.replace(state, outcomes=State.empty().outcomes, hash_sum=(state.hash_sum - forgotten) & MODULUS_MASK)
    return iter(original(rest))


def _mark_ignored(original: Any, segment: Any, promised: int) -> Any:
    damage = original(segment, promised)
    return None if damage is not None and not segment.row.sealed else damage


def _join_the_round(original: Any, reads: Any, number: int, commit_index: int, now: float) -> bool:
    if reads._round is not None:
        reads._round.reads.extend(reads._take())
    return bool(original(reads, number, commit_index, now))


def _read_before_apply(original: Any, reads: Any, applied_index: int) -> None:
    original(reads, 1 << 60)


def _own_hash(original: Any, work: Any) -> Any:
    """A state that depends on where it was computed."""
    state = original(work)
    return msgspec.structs.replace(state, cluster_ms=state.cluster_ms + id(state) // 64 % 2)


def _term_of_any(original: Any, engine: Any, from_index: int | None, *rest: Any) -> Any:
    return [(*entry[:2], engine.term) for entry in original(engine, from_index, *rest)]


def _any_log_wins(original: Any, elections: Any, peer: str, message: Any) -> None:
    original(elections, peer, msgspec.structs.replace(message, last_term=1 << 40))


def _ack_of_nothing(original: Any, progress: Any, index: int, round_number: int) -> None:
    original(progress, index + 1, round_number)


def _any_vote(original: Any, engine: Any, peer: str, message: Any) -> None:
    stale = isinstance(message, VoteReply) and message.term < engine.term
    original(engine, peer, msgspec.structs.replace(message, term=engine.term) if stale else message)


def _from_one(original: Any, numbered: Any, first_id: int) -> None:
    original(numbered, 1)


def _deliver_to_anyone(network: Any, flight: Any) -> Any:
    current = (network._up.get(flight.sender), network._up.get(flight.receiver))
    return msgspec.structs.replace(flight, incarnations=current)


def _old_messages(original: Any, network: Any, flight: Any) -> Any:
    return original(network, _deliver_to_anyone(network, flight))


CRASHES = {"kinds": ("crash", "crash_inside", "heal", "weather", "partition")}
NETWORK = {"kinds": ("partition", "one_way", "partial", "pause", "weather", "heal", "crash")}
ELECTIONS = {"kinds": ("vote_race", "weather"), "gap_s": 9.0, "members": 3, "stormy_s": 30.0, "rate": 3.0}
DAMAGE = {"kinds": ("flip", "crash", "heal")}

DOUBLED = {"kinds": ("doubling", "partition", "crash"), "members": 5, "gap_s": 1.0}
CUT_OFF = {"kinds": ("partition", "partition", "one_way"), "gap_s": 5.0, "stormy_s": 40.0}
ALONE = {"kinds": ("crash", "crash_inside"), "members": 1, "gap_s": 0.5}
CHANGES = {"kinds": ("membership", "membership", "crash", "partition"), "members": 3, "gap_s": 0.7}
SHRUNK = {"kinds": ("membership", "membership", "membership", "crash", "partition"), "members": 5, "gap_s": 0.7, "stormy_s": 30.0}
DIFFER = {"kinds": ("two_differ",), "members": 3, "gap_s": 3.0, "stormy_s": 40.0}
TWO = {"kinds": ("change_two",), "members": 5, "gap_s": 12.0, "stormy_s": 30.0}
INSIDE = {"kinds": ("crash_inside", "crash_inside", "crash", "partition"), "gap_s": 0.3, "members": 3}
READS = {"kinds": ("weather", "partition", "heal"), "gap_s": 1.0, "rate": 100.0, "reads": 0.7, "members": 3}
AWAY = {"kinds": ("absence",), "gap_s": 8.0, "stormy_s": 30.0}
SILENT = {"kinds": ("one_way",), "gap_s": 10.0, "stormy_s": 30.0, "rate": 60.0}
WIPES = {"kinds": ("wipe", "wipe", "crash", "partition", "heal"), "members": 3, "gap_s": 1.5, "stormy_s": 40.0}
OLD = {"kinds": ("old_file", "old_file", "crash", "partition", "heal"), "members": 3, "gap_s": 1.5, "stormy_s": 40.0}
FLIPS = {"kinds": ("flip_race",), "members": 3, "gap_s": 6.0, "stormy_s": 30.0}
LATE = {"kinds": ("late", "deaf_leader", "deaf_leader"), "gap_s": 1.0, "rate": 5.0, "members": 5}
LIVES = {"kinds": ("late", "crash", "blink", "transfer"), "gap_s": 0.5}
BLINKS = {"kinds": ("blink", "weather"), "gap_s": 4.0, "members": 3}
DEAF = {"kinds": ("deaf_leader",), "gap_s": 5.0, "rate": 100.0, "reads": 0.7, "members": 3}
HANDED_OVER = {"kinds": ("transfer", "transfer", "weather"), "gap_s": 0.3, "rate": 100.0, "reads": 0.7, "members": 3}

minority = property(lambda configuration: max(1, len(configuration.members) // 2))

PLANTS: tuple[Plant, ...] = (
    # the disk
    Plant("no sync of the journal", "D1", switch=_replace(MemoryDisk, "fdatasync", _nothing), plan=CRASHES),
    Plant("acknowledged before the sync", "D1", switch=_around(Replica, "_ship", _acknowledge_first), plan=INSIDE, budget=100),
    # with pre-vote on, two candidates of one term and a crash between their requests would have to meet within a millisecond
    Plant(
        "vote not stored (and no pre-vote)", "D1", rules=Rules(pre_vote=False), switch=_stored(_forgotten_vote), plan=ELECTIONS, budget=150
    ),
    Plant("term not stored", "D1", switch=_stored(_forgotten_term), plan=ELECTIONS),
    Plant("journal cut on corruption", "D10", switch=_around(Segment, "check", _mark_ignored), plan=DAMAGE, budget=150),
    Plant("checksums of records ignored", "D5", switch=_replace(zlib, "crc32", lambda data, value=0: 7), plan=DAMAGE),
    Plant("outcomes left out of snapshots", "C2", switch=_around(codec, "snapshot_chunks", _without_outcomes), plan=CRASHES),
    Plant("a first start asks nobody", "first start", rules=Rules(ask_before_founding=False), plan=WIPES, budget=100),
    Plant("an older hard state is taken", "D7", switch=_replace(recovery, "_check_age", _nothing), plan=OLD, budget=200),
    # the protocol
    Plant("repeats not recognized", "C2", switch=_replace(Draft, "get", lambda draft, key: None)),
    Plant("matching entries cut", "R1", rules=Rules(keep_matching=False), plan=NETWORK),
    Plant(
        "votes of older terms count", "R2", rules=Rules(pre_vote=False), switch=_around(Engine, "receive", _any_vote), plan=LATE, budget=100
    ),
    Plant(
        "messages of an earlier life taken (and numbers from 1)",
        "R2",
        switch=_all(
            _around(SimNetwork, "deliver", _old_messages),
            _around(Proposals, "__init__", _from_one),
            _around(Reads, "__init__", _from_one),
        ),
        plan=LIVES,
        budget=100,
    ),
    Plant(
        "commit moves before a match",
        "R3",
        rules=Rules(match_before_commit=False),
        switch=_replace(replication, "MAX_APPEND_BYTES", 1),  # an entry a message, so that one matches and the next is still to come
        plan=NETWORK,
        budget=100,
    ),
    Plant("several membership changes at once", "R4", rules=Rules(one_change_at_a_time=False), plan=CHANGES, budget=200),
    Plant("votes counted without the voter", "R7", rules=Rules(voters_once=False), plan=DOUBLED, budget=60),
    Plant("elections without a pre-vote", "R8", rules=Rules(pre_vote=False), plan=AWAY),
    Plant("a leader that nobody answers leads on", "R9", rules=Rules(check_quorum=False), plan=AWAY),
    Plant("the configured members count after a restart", "R13", rules=Rules(boot_from_log=False), plan=SHRUNK, budget=200),
    Plant("refusals step back one by one", "R14", rules=Rules(jump_back=False), plan=NETWORK),
    Plant("appends without a window", "R15", rules=Rules(window=False), plan=SILENT),
    Plant("stale terms not answered", "R16", rules=Rules(answer_stale=False), plan=BLINKS, budget=200),
    Plant("only who has everything takes over", "R17", rules=Rules(wait_for_successor=False), plan=HANDED_OVER),
    Plant(  # a step syncs behind its tick, so that one tick alone never finds anything that is not synced
        "the leader counts what it has not synced (and ticks twice)",
        "R19",
        rules=Rules(count_self_synced=False),
        switch=_around(Engine, "tick", _twice),
        plan=ALONE,
    ),
    Plant(
        "commands end with their leader unanswered (and have no deadline in the log)",
        "R12",
        switch=_all(_replace(Proposals, "lost_leadership", _nothing), _replace(Proposals, "appended", _without_deadline)),
        plan=CUT_OFF,
    ),
    Plant("a minority is a majority", "Raft", switch=_replace(Configuration, "quorum", minority)),
    Plant("a vote for any log", "Raft", switch=_around(Elections, "on_request_vote", _any_log_wins), plan=NETWORK, budget=200),
    Plant("older terms committed by count", "Raft", switch=_around(Engine, "_SyncObj__getEntries", _term_of_any), plan=NETWORK, budget=300),
    Plant("an acknowledgement of one entry too many", "Raft", switch=_around(Progress, "on_matched", _ack_of_nothing)),
    Plant("apply depends on the process", "Raft", switch=_around(Work, "finish", _own_hash)),
    # reads
    Plant("reads before an entry of the term", "C1", rules=Rules(read_after_noop=False), plan=HANDED_OVER, budget=100),
    Plant("reads without a round", "C1", rules=Rules(confirm_reads=False), plan=NETWORK),
    Plant("a read joins an earlier round", "C1", switch=_around(Reads, "start_round", _join_the_round), plan=DEAF, budget=100),
    Plant("reads before the entries are applied", "C1", switch=_around(Reads, "settle", _read_before_apply), plan=READS),
    # integrity
    Plant("a wrong state is not set aside", "integrity", rules=Rules(set_aside=False), plan=DIFFER),
    Plant("two members set aside at once", "integrity", rules=Rules(one_set_aside=False), plan=TWO, budget=100),
    Plant("writes between two that differ", "integrity", rules=Rules(hold_undecided=False), plan=DIFFER),
    Plant("a member that was set aside votes", "integrity", rules=Rules(wiped_waits=False), plan=FLIPS),
)
