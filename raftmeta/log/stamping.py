"""The time that a leader stamps commands with: what most members' clocks say, moved on evenly, never back.

Keys carry their clients' time and outcomes are dropped by the stamped time, so one wrong clock must decide nothing. Members tell each other
their wall clocks; the time stamped is the median of all that are known, the last applied command's own time among them where the number is
even. Within a leadership it approaches that median slowly: a clock that jumps wrongly is noticed before it has moved the cluster, and one
that was set right counts without a restart. Clocks are kept as the difference to the monotonic clock, which nobody sets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

FORWARD = 120.0  # milliseconds gained a millisecond while behind: three hours take a minute and a half


class Stamping:
    def __init__(self, clock: Callable[[], float], wall_ms: Callable[[], int]) -> None:
        """`clock`: monotonic seconds; `wall_ms`: Unix time, which anybody may set."""
        self._clock, self._wall_ms = clock, wall_ms
        self._peers: dict[str, float] = {}  # member -> its wall clock less our monotonic one, ms
        self._logged_ms, self._logged = 0, 0.0  # the newest stamp that was applied, and less the monotonic clock
        self._term = -1
        self._base = self._at = 0.0  # of this leadership's stamps; when it was looked at last

    def heard(self, peer: str, wall_ms: int) -> None:
        """A member told its clock. How long that was under way does not matter here."""
        self._peers[peer] = wall_ms - self._clock() * 1000

    def keep(self, members: Collection[str]) -> None:
        """Forget who is no member any more."""
        self._peers = {peer: base for peer, base in self._peers.items() if peer in members}

    def applied(self, stamped_ms: int) -> None:
        """The clock of the state."""
        if stamped_ms > self._logged_ms:
            self._logged_ms, self._logged = stamped_ms, stamped_ms - self._clock() * 1000

    def own_offset_ms(self) -> int:
        """By how much this member's own wall clock differs from what most members say; positive when it is ahead."""
        return round(self._own() - self._reference())

    def stamp_ms(self, term: int) -> int:
        """Unix milliseconds for the next entry of this leadership."""
        now, reference = self._clock(), self._reference()
        if term != self._term:
            self._term, self._base = term, reference
        else:
            passed_ms = (now - self._at) * 1000
            behind = reference - self._base
            self._base += min(behind, passed_ms * FORWARD) if behind > 0 else max(behind, -passed_ms)  # back is standing still
        self._at = now
        return int(self._base + now * 1000)

    def _own(self) -> float:
        return self._wall_ms() - self._clock() * 1000

    def _reference(self) -> float:
        known = [self._own(), *self._peers.values()]
        if len(known) % 2 == 0 and self._logged_ms:
            known.append(self._logged)
        return sorted(known)[(len(known) - 1) // 2]
