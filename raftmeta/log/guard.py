"""The rules that PySyncObj leaves out, as pure functions. Row names (R1 ...) are those of docs/guarantees.md.

Each function judges values and returns what the engine may do; none touches the engine, the journal or the network. Every rule can be
switched off by name in `Rules`, which only tests do: a test of a rule must fail with its rule off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec

from raftmeta.log.messages import MAX_CHUNK_BYTES, AppendEntries, Entry, SnapshotChunk

MAX_NUMBER = 1 << 62  # of terms and indexes: disk and wire hold twice that, so one more always fits
MAX_TERMS_MISSED = 1 << 32  # elections while a member was away; one every 10 ms for a year. A peer that says more is wrong


class Rules(msgspec.Struct, frozen=True):
    """All on, always; tests switch single ones off to see that they matter."""

    keep_matching: bool = True  # R1: only a real conflict deletes
    drop_stale_terms: bool = True  # R2
    bound_terms: bool = True  # a term that no number of elections explains is not adopted
    read_before_append: bool = True  # what could not be applied is not appended
    match_before_commit: bool = True  # R3
    one_change_at_a_time: bool = True  # R4
    voters_once: bool = True  # R7
    pre_vote: bool = True  # R8
    closed_link_counts: bool = True  # R8: a closed link to the leader ends its stickiness, and is asked about after one heartbeat
    check_quorum: bool = True  # R9
    boot_from_log: bool = True  # R13: the configuration in the journal, not the configured one
    jump_back: bool = True  # R14: a refusal names commit + 1
    window: bool = True  # R15
    answer_stale: bool = True  # R16
    wait_for_successor: bool = True  # R17: leadership moves when the target has caught up, not only if it has at this instant
    wiped_waits: bool = True  # a member that started with nothing does not vote before it has caught up
    ask_before_founding: bool = True  # a first start forms a cluster only where nobody holds anything
    keep_committed: bool = True  # R1: what an earlier life knew to be committed goes for no leader
    count_self_synced: bool = True  # R19
    set_aside: bool = True  # a member whose state a majority contradicts serves no more
    contradicted_stands_by: bool = True  # until then it neither leads nor answers reads
    one_set_aside: bool = True  # at most one at a time
    hold_undecided: bool = True  # no writes while states differ and no majority says which is right
    read_after_noop: bool = True  # C1
    confirm_reads: bool = True  # C1: a majority answers a round that began after the read arrived


class Verdict(Enum):
    REFUSE = "refuse"
    ACCEPT = "accept"
    HALT = "halt"  # committed entries would have to go: two truths, stop before serving either


class AppendPlan(NamedTuple):
    """What to do with an append. Accepted: `entries` follow (prev_index, prev_term); what is there behind it goes, if anything."""

    verdict: Verdict
    prev_index: int
    prev_term: int
    entries: Sequence[Entry]
    matched_index: int  # up to here the log equals the leader's, once appended and synced
    detail: str = ""


class LogBounds(NamedTuple):
    base_index: int  # last index below the log: covered by the snapshot
    last_index: int
    commit_index: int


TermAt = Callable[[int], int | None]


def plan_append(message: AppendEntries, log: LogBounds, term_at: TermAt, rules: Rules) -> AppendPlan:
    """R1, R3: match first, keep what matches, delete only from a real (index, term) conflict, never at or below commit.

    Everything up to the commit index equals the leader's log by leader completeness, so a message that starts below it matches there and
    its covered entries are skipped; they are still compared where the log holds them, and a difference halts the member.
    """
    matched = message.prev_index + len(message.entries)
    if message.prev_index > log.last_index:
        return _refuse(log, rules, message)
    if message.prev_index >= log.base_index:
        held = term_at(message.prev_index)
        if held != message.prev_term:
            if message.prev_index <= log.commit_index and held is not None:
                return _halt(f"entry {message.prev_index} is committed here in term {held}, the leader has term {message.prev_term}")
            return _refuse(log, rules, message)
    if not rules.keep_matching:
        return AppendPlan(Verdict.ACCEPT, message.prev_index, message.prev_term, message.entries, matched)
    for position, entry in enumerate(message.entries):
        if entry.index <= log.base_index:
            continue
        if entry.index > log.last_index:
            return _accept(entry.index - 1, message.entries[position:], term_at, matched)
        held = term_at(entry.index)
        if held != entry.term:
            if entry.index <= log.commit_index:
                return _halt(f"entry {entry.index} is committed here in term {held}, the leader sent term {entry.term}")
            return _accept(entry.index - 1, message.entries[position:], term_at, matched)
    return _accept(log.last_index, (), term_at, matched)


def well_formed(message: AppendEntries) -> bool:
    """Whether indexes are consecutive after prev_index, terms do not fall and none is above the sender's."""
    if min(message.term, message.prev_index, message.prev_term, message.commit_index, message.round) < 0:
        return False
    term = message.prev_term
    for position, entry in enumerate(message.entries, message.prev_index + 1):
        if entry.index != position or entry.term < term or entry.term > message.term or not entry.payload:
            return False
        term = entry.term
    return term <= message.term


def is_plausible(term: int, own_term: int, joining: bool) -> bool:
    """Whether a message's term can be one of this cluster. A member that starts with nothing knows none and takes any.

    Terms only rise and are kept for ever: without this, one wrong message could use them up for the whole cluster.
    """
    return 0 <= term <= MAX_NUMBER and (joining or term <= own_term + MAX_TERMS_MISSED)


def is_chunk(chunk: SnapshotChunk) -> bool:
    """Whether it could be a part of a snapshot that the leader of its term has."""
    whole = 0 < chunk.index <= MAX_NUMBER and 0 <= chunk.index_term <= chunk.term and chunk.size_bytes > 0 and len(chunk.sha256) == 32
    return whole and 0 <= chunk.offset <= chunk.size_bytes and len(chunk.data) <= MAX_CHUNK_BYTES and chunk.round >= 0


def up_to_date(last_term: int, last_index: int, own_term: int, own_index: int) -> bool:
    """Raft §5.4.1: the later last term wins, then the longer log."""
    return (last_term, last_index) >= (own_term, own_index)


def quorum_value(values: Sequence[int], quorum: int) -> int:
    """The highest value that at least `quorum` of the values reach."""
    return sorted(values, reverse=True)[quorum - 1]


def _accept(prev_index: int, entries: Sequence[Entry], term_at: TermAt, matched: int) -> AppendPlan:
    term = term_at(prev_index)
    assert term is not None, prev_index
    return AppendPlan(Verdict.ACCEPT, prev_index, term, entries, matched)


def _refuse(log: LogBounds, rules: Rules, message: AppendEntries) -> AppendPlan:
    ask_for = log.commit_index if rules.jump_back else max(message.prev_index - 1, 0)
    return AppendPlan(Verdict.REFUSE, 0, 0, (), ask_for)


def _halt(detail: str) -> AppendPlan:
    return AppendPlan(Verdict.HALT, 0, 0, (), 0, detail)
