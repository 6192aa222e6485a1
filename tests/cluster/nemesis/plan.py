"""What happens when: the faults of a run, drawn from its seed alone. Pure.

Kinds come in shuffled decks, so that each comes once before any comes twice. A step says what is drawn and leaves to the moment who leads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from random import Random

import msgspec

SHORTEST_HOLD_S, LONGEST_HOLD_S = 1.0, 30.0
HOLD_SHARE = 0.03  # of a run; half an hour has faults of up to 30 s
BITING_HOLD_S = 4.0  # the longest of a short run: twice what it takes to notice that a leader is gone and to elect another


class Kind(StrEnum):
    KILL = "kill"  # SIGKILL, later a restart
    PAUSE = "pause"  # SIGSTOP, later SIGCONT
    ISOLATE = "isolate"  # nothing passes between one member and the others
    BRIDGE = "bridge"  # a-b and b-c talk, a-c do not
    ONE_WAY = "one-way"  # what one says is lost, what it is told arrives
    ROUGH_LINKS = "rough-links"  # delay and loss between all
    FULL_DISK = "full-disk"  # a small tmpfs under one member's data, filled
    SLOW_SYNC = "slow-sync"  # every fdatasync of one member takes long
    FAILED_SYNC = "failed-sync"  # one fdatasync fails with EIO
    CLOCK = "clock"  # the wall clock of one member jumps an hour, and back
    ROLLING = "rolling-restart"  # SIGTERM and a restart, one by one
    ROLLBACK = "rollback"  # planted: two disks go back to an older state, which no cluster of three survives


PLANTED = frozenset({Kind.ROLLBACK})
LEADERS_ONLY = frozenset({Kind.FULL_DISK})  # a follower without room is only told by its log; a leader has to refuse and hand over
ORDINARY = tuple(kind for kind in Kind if kind not in PLANTED)


class Step(msgspec.Struct, frozen=True):
    kind: Kind
    calm_s: float  # before it
    hold_s: float  # between its begin and its end
    leads: bool  # it is for the leader, else for a follower
    draw: float  # in [0, 1): everything else that is to be chosen


def longest_hold_s(seconds: float) -> float:
    return min(LONGEST_HOLD_S, max(BITING_HOLD_S, seconds * HOLD_SHARE))


def steps(seed: int, seconds: float, kinds: Sequence[Kind]) -> Iterator[Step]:
    """Without end; the caller stops. The same arguments give the same steps."""
    random = Random(f"nemesis {seed}")
    longest = longest_hold_s(seconds)
    while True:
        deck = sorted(kinds)
        random.shuffle(deck)
        for kind in deck:
            yield Step(
                kind=kind,
                calm_s=random.uniform(0.3, 0.3 + longest / 3),
                hold_s=random.uniform(SHORTEST_HOLD_S, longest),
                leads=random.random() < 0.6 or kind in LEADERS_ONLY,
                draw=random.random(),
            )
