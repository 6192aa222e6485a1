"""Strangers cause as many refusals as they like and as few log lines as they must."""

from __future__ import annotations

import pytest
import structlog

from raftmeta.log.notices import BURST, MAX_DETAIL, MAX_PLACES, Notices

EVENTS = ("refused_bad_tls", "refused_handshake_timeout")


class Flood:
    def __init__(self) -> None:
        self.now = 100.0
        self.notices = Notices(lambda: self.now, "m1")
        self.sent = 0

    def last(self, seconds: float, per_s: int, places: int) -> None:
        for _ in range(int(seconds * per_s)):
            self.now += 1.0 / per_s
            self.sent += 1
            for event in EVENTS:
                self.notices.warn(event, f"127.0.{self.sent % places}", "x" * 10 * MAX_DETAIL)


@pytest.mark.parametrize("places", [1, MAX_PLACES, 100_000], ids=["one", "as many as are remembered", "always another one"])
def test_a_flood_from_many_addresses_leaves_few_log_lines_and_they_say_how_many_are_missing(places: int) -> None:
    flood = Flood()
    with structlog.testing.capture_logs() as lines:
        flood.last(60.0, 500, places)
        flood.now += 10.0
        flood.last(0.002, 500, places)
    for event in EVENTS:
        found = [line for line in lines if line["event"] == event]
        assert len(found) <= BURST + 61
        assert len(found) + sum(line["suppressed"] for line in found) == flood.sent
        assert flood.notices.counters()[event] == flood.sent
    assert max(len(line["detail"]) for line in lines) == MAX_DETAIL


def test_a_flood_of_one_kind_does_not_silence_another_and_is_forgotten() -> None:
    flood = Flood()
    flood.last(10.0, 500, 100_000)
    with structlog.testing.capture_logs() as lines:
        flood.notices.warn("refused_certificate_name", "127.0.0.1", "another one")
        flood.now += BURST
        for place in range(BURST):
            flood.notices.warn(EVENTS[0], f"10.0.0.{place}", "again")
    assert len(lines) == 1 + BURST


def test_links_that_come_and_go_without_end_leave_few_log_lines_too() -> None:
    flood = Flood()
    with structlog.testing.capture_logs() as lines:
        for _ in range(1_000):
            flood.now += 0.01
            flood.notices.info("link_up", peer="m2")
    assert BURST <= len(lines) <= BURST + 10
    assert flood.notices.counters()["link_up"] == 1_000
