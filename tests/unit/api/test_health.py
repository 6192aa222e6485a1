"""Liveness, readiness and metrics: what they look at, and what they never wait for."""

from __future__ import annotations

import threading

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from api import health
from api.metrics import OTHER, PEER_EVENTS
from tests.support.fake_log import FakeLog, FakeMember
from tests.unit.api.harness import MODEL, Exchange, api, run


def test_liveness_answers_whatever_the_log_does() -> None:
    async def work() -> None:
        async with api(FakeMember(threaded=True)) as made:
            switches = made.member.log.switches
            switches.no_leader = switches.stopped = True
            release = threading.Event()
            assert made.member.log._pool is not None
            made.member.log._pool.submit(release.wait)  # the engine's thread hangs in a sync
            try:
                for _ in range(3):
                    reply = await made.client.get("/livez")
                    assert (reply.status_code, reply.json()) == (200, {"alive": True})
            finally:
                release.set()

    run(work())


def test_a_ready_member_says_so_and_shows_why_on_request() -> None:
    async def work() -> None:
        async with api() as made:
            assert (await made.client.get("/readyz")).json() == {"ready": True, "checks": []}
            for query in ("verbose", "verbose=1", "verbose=true"):
                shown = (await made.client.get(f"/readyz?{query}")).json()
                assert [check["name"] for check in shown["checks"]] == ["process", "log", "leader", "applied", "clock", "state"]
                assert all(check["ok"] and check["reason"] for check in shown["checks"])
            assert (await made.client.get("/readyz?verbos")).json()["code"] == "bad_field"

    run(work())


@pytest.mark.parametrize(
    ("offset_ms", "said"), [(0, "agrees"), (9_999, "agrees"), (172_800_000, "172800 s ahead of"), (-60_000, "60 s behind")]
)
def test_a_wrong_clock_is_said_and_keeps_nobody_from_being_ready(offset_ms: int, said: str) -> None:
    status = msgspec.structs.replace(FakeMember().log.status(), clock_offset_ms=offset_ms)
    check = health._clock(status)
    assert check.ok and said in check.reason


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("no_leader", ["leader"]),
        ("silent", ["leader"]),
        ("unheard", ["leader"]),
        ("stopped", ["log"]),
        ("behind", ["applied"]),
        ("unverified", ["state"]),
        ("draining", ["process"]),
    ],
)
def test_each_condition_alone_makes_a_member_not_ready(fault: str, names: list[str]) -> None:
    async def work() -> None:
        async with api() as made:
            if fault in ("no_leader", "stopped"):
                setattr(made.member.log.switches, fault, True)
            elif fault in ("silent", "unheard"):
                made.member.log.switches.staleness_ms = 5_001 if fault == "silent" else float("inf")
            elif fault == "behind":
                made.member.log = Behind(made.member.log)  # type: ignore[assignment]
            elif fault == "unverified":
                made.member.verified = False
            else:
                made.service.draining = True
            reply = await made.client.get("/readyz")
            assert (reply.status_code, reply.json()["ready"]) == (503, False)
            assert [check["name"] for check in reply.json()["checks"]] == names
            assert (await made.client.get("/livez")).status_code == 200

    run(work())


class Behind:
    """A log with much to apply."""

    def __init__(self, log: FakeLog) -> None:
        self._log = log

    def status(self) -> object:
        return msgspec.structs.replace(self._log.status(), commit_index=5_000)

    def staleness_ms(self) -> float:
        return self._log.staleness_ms()

    def close(self) -> None:
        self._log.close()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_requests_are_counted_by_template_and_status_and_never_by_name() -> None:
    async def work() -> None:
        async with api() as made:
            await made.publish("9.9.9")
            await made.client.get(f"{MODEL}/versions/9.9.9")
            await made.client.get(f"{MODEL}/versions/8.8.8")
            await made.client.get("/nobody/here")
            reply = await made.client.get("/metrics")
            assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
            found = samples(reply.text)
            count = "raftmeta_http_request_duration_seconds_count"
            route = ("route", "/v1/models/{model}/versions/{label}")
            assert found[count, (("method", "PUT"), route, ("status", "201"))] == 1
            assert found[count, (("method", "GET"), route, ("status", "200"))] == 1
            assert found[count, (("method", "GET"), route, ("status", "404"))] == 1
            assert found["raftmeta_http_problems_total", (("code", "unknown_version"),)] == 1
            for name in ("encoder", "9.9.9", "8.8.8", "nobody"):
                assert name not in reply.text

    run(work())


def test_latencies_fall_into_cumulative_buckets() -> None:
    async def work() -> None:
        async with api() as made:
            for seconds in (0.0004, 0.0005, 0.02, 99):
                made.service.stats.observe("/x", "GET", 200, seconds)
            found = samples((await made.client.get("/metrics")).text)

            def bucket(bound: str) -> float:
                return found[
                    "raftmeta_http_request_duration_seconds_bucket",
                    tuple(sorted({"route": "/x", "method": "GET", "status": "200", "le": bound}.items())),
                ]

            assert [bucket(bound) for bound in ("0.0005", "0.01", "0.025", "10.0", "+Inf")] == [2, 2, 3, 3, 4]

    run(work())


def test_log_watch_and_nodes_show_in_the_metrics() -> None:
    async def work() -> None:
        async with api() as made:
            await made.publish()
            async with Exchange(made.application, "/v1/watch", "from_revision=0") as watch:
                await watch.until(lambda seen: len(seen.messages) == 2)
                found = samples((await made.client.get("/metrics")).text)
            assert found["raftmeta_revision", ()] == 1
            assert found["raftmeta_log_role", (("role", "leader"),)] == 1
            assert found["raftmeta_log_role", (("role", "follower"),)] == 0
            assert found["raftmeta_watch_watchers", ()] == 1
            assert found["raftmeta_watch_sent_events_total", ()] == 2
            assert found["raftmeta_nodes_known", ()] == 0

    run(work())


def test_events_of_the_links_are_counted_by_known_names_only() -> None:
    async def work() -> None:
        async with api() as made:
            made.member.peer_events = {"refused_bad_tls": 3, "link_up": 2, "of_a_later_build": 4, "of_another": 1}
            found = samples((await made.client.get("/metrics")).text)
            events = {labels[0][1]: count for (name, labels), count in found.items() if name == "raftmeta_peer_events_total"}
            assert (events["refused_bad_tls"], events["link_up"], events["other"], events["dial_failed"]) == (3, 2, 5, 0)
            assert set(events) == {*PEER_EVENTS, OTHER}

    run(work())


def test_the_metrics_of_a_member_in_trouble_can_still_be_read() -> None:
    async def work() -> None:
        async with api() as made:
            made.member.log.switches.stopped = True
            made.member.log.switches.staleness_ms = float("inf")
            found = samples((await made.client.get("/metrics")).text)
            assert found["raftmeta_log_stopped", ()] == 1
            assert found["raftmeta_staleness_seconds", ()] == float("inf")

    run(work())
