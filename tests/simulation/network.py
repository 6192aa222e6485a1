"""A network in memory under a virtual clock: connections that open and close, messages that are late, lost, out of order or doubled."""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec

from raftmeta.log import messages
from raftmeta.log.messages import AnyMessage
from raftmeta.log.peers import Connected, Disconnected, PeerEvent, Received


class Weather(msgspec.Struct, frozen=True):
    """Faults in force. Probabilities per message; delays in seconds."""

    loss: float = 0.0
    double: float = 0.0
    delay_min_s: float = 0.0002
    delay_max_s: float = 0.002
    slow: float = 0.0  # probability of a delay up to slow_s instead, which reorders
    slow_s: float = 0.5
    late_to: str = ""  # whatever this member is sent takes up to slow_s
    cut: frozenset[tuple[str, str]] = frozenset()  # ordered pairs (from, to) that carry nothing

    def is_clear(self) -> bool:
        return not (self.loss or self.double or self.slow or self.late_to or self.cut)


class Flight(msgspec.Struct, frozen=True):
    sender: str
    receiver: str
    incarnations: tuple[int, int]
    frame: bytes


class SimNetwork:
    """Connections are by pair; both ends must be up and the pair not cut both ways. A message of an older incarnation is dropped (R2)."""

    def __init__(self, random: Random, feature: int = 1) -> None:
        """`feature`: what a link tells of the build behind it."""
        self._feature = feature
        self.weather = Weather()
        self._random = random
        self._up: dict[str, int] = {}
        self._links: set[tuple[str, str]] = set()
        self.counts: Counter[str] = Counter()

    def up(self, member: str, incarnation: int) -> None:
        self._up[member] = incarnation

    def down(self, member: str) -> list[tuple[str, PeerEvent]]:
        """The process ended: its peers see their links close."""
        self._up.pop(member, None)
        gone = [link for link in sorted(self._links) if member in link]
        self._links.difference_update(gone)
        return [(a if b == member else b, Disconnected(member)) for a, b in gone]

    def refresh(self) -> list[tuple[str, PeerEvent]]:
        """Open and close links as the weather allows; what each member sees of it."""
        seen: list[tuple[str, PeerEvent]] = []
        members = sorted(self._up)
        for position, a in enumerate(members):
            for b in members[position + 1 :]:
                possible = (a, b) not in self.weather.cut and (b, a) not in self.weather.cut
                if possible and (a, b) not in self._links:
                    self._links.add((a, b))
                    seen += [(a, Connected(b, self._up[b], self._feature)), (b, Connected(a, self._up[a], self._feature))]
                elif (a, b) in self._links and (a, b) in self.weather.cut and (b, a) in self.weather.cut:
                    self._links.discard((a, b))
                    seen += [(a, Disconnected(b)), (b, Disconnected(a))]
        return seen

    def send(self, sender: str, receiver: str, message: AnyMessage) -> list[tuple[float, Flight]]:
        """The flights of one message with their delays; none when it is lost."""
        link = (min(sender, receiver), max(sender, receiver))
        if link not in self._links or (sender, receiver) in self.weather.cut:
            return []
        flight = Flight(sender, receiver, (self._up[sender], self._up[receiver]), messages.encode(message))
        weather = self.weather
        if not (weather.double or weather.loss or weather.slow or weather.late_to):
            return [(self._random.uniform(weather.delay_min_s, weather.delay_max_s), flight)]
        flights = []
        copies = 2 if self._random.random() < weather.double else 1
        self.counts["duplication"] += copies - 1
        for _ in range(copies):
            if self._random.random() >= weather.loss:
                flights.append((self._delay(receiver), flight))
            else:
                self.counts["loss"] += 1
        return flights

    def deliver(self, flight: Flight) -> Received | None:
        link = (min(flight.sender, flight.receiver), max(flight.sender, flight.receiver))
        alive = (self._up.get(flight.sender), self._up.get(flight.receiver)) == flight.incarnations
        if not alive or link not in self._links or (flight.sender, flight.receiver) in self.weather.cut:
            self.counts["stale message"] += not alive
            return None
        return Received(flight.sender, messages.decode(flight.frame))

    def _delay(self, receiver: str) -> float:
        weather = self.weather
        if receiver == weather.late_to or self._random.random() < weather.slow:
            self.counts["delay"] += 1
            return self._random.uniform(weather.delay_max_s, weather.slow_s)
        return self._random.uniform(weather.delay_min_s, weather.delay_max_s)
