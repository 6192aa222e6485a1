"""Counters of requests and the /metrics page. The only file that imports prometheus_client.

Requests are counted in plain numbers by the event loop's thread and turned into metric families when somebody asks: two dictionary
look-ups per request. Labels are route templates, methods, statuses, roles and kinds of events, never a name from a path or a version, so
their number is bounded by the tables they come from. Names are promises, held by a golden file.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from api.deps import Member
from raftmeta.log.hello import Refusal

BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
PEER_EVENTS = (
    "accept_paused", "bad_peer_address", "dial_failed", "link_down", "link_replaced", "link_up", "message_not_allowed", "pending_closed",
    "queue_full", *(f"refused_{reason}" for reason in Refusal),
)  # fmt: skip
OTHER = "other"  # for one that this list does not know; a test compares it with what the links count
ROLES = ("leader", "candidate", "follower", "learner", "stopped")


class _Series:
    __slots__ = ("buckets", "count", "total_s")

    def __init__(self) -> None:
        self.count = 0
        self.total_s = 0.0
        self.buckets = [0] * (len(BUCKETS_S) + 1)


class RequestStats:
    """Written by the event loop only."""

    def __init__(self) -> None:
        self.series: dict[tuple[str, str, int], _Series] = {}
        self.problems: dict[str, int] = {}
        self.compacted_watches = 0
        self.sent_events = 0
        self.lost_log_lines: Callable[[], int] = lambda: 0  # of this process, whoever wrote them

    def observe(self, route: str, method: str, status: int, seconds: float) -> None:
        series = self.series.get((route, method, status))
        if series is None:
            series = self.series[route, method, status] = _Series()
        series.count += 1
        series.total_s += seconds
        series.buckets[bisect_left(BUCKETS_S, seconds)] += 1

    def problem(self, code: str) -> None:
        self.problems[code] = self.problems.get(code, 0) + 1


class _MemberCollector(Collector):
    def __init__(self, member: Member, stats: RequestStats) -> None:
        self._member = member
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        yield from _request_families(self._stats)
        yield from _log_families(self._member)
        yield _peer_family(self._member)
        yield from _watch_families(self._member, self._stats)
        yield from _node_families(self._member)
        yield _counter("raftmeta_lost_log_lines", "Log lines that could not be written", self._stats.lost_log_lines())


def page(member: Member, stats: RequestStats) -> bytes:
    """The metrics of this process in Prometheus text form."""
    registry = CollectorRegistry()
    registry.register(_MemberCollector(member, stats))
    return generate_latest(registry)


def _request_families(stats: RequestStats) -> Iterator[Metric]:
    seconds = HistogramMetricFamily(
        "raftmeta_http_request_duration_seconds", "Time from the request's head to its reply", labels=["route", "method", "status"]
    )
    bounds = [*map(str, BUCKETS_S), "+Inf"]
    for (route, method, status), series in sorted(stats.series.items()):
        pairs = list(zip(bounds, accumulate(series.buckets), strict=True))
        seconds.add_metric([route, method, str(status)], pairs, series.total_s)
    yield seconds
    problems = CounterMetricFamily("raftmeta_http_problems", "Replies with an error, by its code", labels=["code"])
    for code, count in sorted(stats.problems.items()):
        problems.add_metric([code], count)
    yield problems


def _log_families(member: Member) -> Iterator[Metric]:
    status, state = member.log.status(), member.state
    role = GaugeMetricFamily("raftmeta_log_role", "1 for the role that this member has now", labels=["role"])
    for name in ROLES:
        role.add_metric([name], float(status.role == name))
    yield role
    yield _gauge("raftmeta_log_has_leader", "1 while this member knows a leader", float(bool(status.leader_id)))
    yield _gauge("raftmeta_log_term", "Raft term", status.term)
    yield _gauge("raftmeta_log_last_index", "Index of the last record in the journal", status.last_index)
    yield _gauge("raftmeta_log_commit_index", "Index of the last committed record", status.commit_index)
    yield _gauge("raftmeta_log_applied_index", "Index of the last applied record", status.applied_index)
    yield _gauge("raftmeta_log_snapshot_index", "Index that the last snapshot covers", status.snapshot_index)
    yield _gauge("raftmeta_log_journal_bytes", "Size of the journal on disk", status.journal_bytes)
    yield _gauge("raftmeta_clock_offset_seconds", "Own wall clock less what most members' say", status.clock_offset_ms / 1_000)
    yield _gauge("raftmeta_log_sync_seconds", "Duration of the last journal sync", status.sync_ms / 1_000)
    yield _gauge("raftmeta_log_members", "Members of the cluster as this one knows them", len(status.members))
    yield _gauge("raftmeta_log_stopped", "1 when the log has stopped by a fault", float(bool(status.fault)))
    staleness = member.log.staleness_ms()
    yield _gauge("raftmeta_staleness_seconds", "Bound on how far behind a stale read is", staleness / 1_000 if staleness >= 0 else math.inf)
    yield _gauge("raftmeta_revision", "Revision of the newest applied state", state.revision)
    yield _gauge("raftmeta_generation", "Generation of the state", state.generation)
    yield _gauge("raftmeta_feature_level", "Replicated feature level", state.feature_level)


def _peer_family(member: Member) -> Metric:
    """Every known event, also before its first time, so that an alarm on its rise sees the first one."""
    counts = dict.fromkeys((*PEER_EVENTS, OTHER), 0)
    for event, count in member.peer_events.items():
        counts[event if event in counts else OTHER] += count
    family = CounterMetricFamily("raftmeta_peer_events", "What happened on the links to the other members", labels=["event"])
    for event, count in counts.items():
        family.add_metric([event], count)
    return family


def _watch_families(member: Member, stats: RequestStats) -> Iterator[Metric]:
    hub = member.watch
    events, size_bytes = hub.retained
    yield _gauge("raftmeta_watch_watchers", "Open watches", hub.watchers)
    yield _gauge("raftmeta_watch_retained_events", "Events that a watch can still be opened before", events)
    yield _gauge("raftmeta_watch_retained_bytes", "Size of the retained events", size_bytes)
    yield _gauge("raftmeta_watch_floor_revision", "Oldest revision that a watch can be opened from", hub.floor)
    yield _counter("raftmeta_watch_sent_events", "Events sent to watches", stats.sent_events)
    yield _counter("raftmeta_watch_compacted", "Watches that ended because their position was compacted", stats.compacted_watches)


def _node_families(member: Member) -> Iterator[Metric]:
    views = member.nodes.views()
    yield _gauge("raftmeta_nodes_known", "Serving nodes that were heard within a day", len(views))
    yield _gauge("raftmeta_nodes_missing", "Known serving nodes that are silent for too long", sum(view.missing for view in views))


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(name, what, value=value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(name, what, value=value)
