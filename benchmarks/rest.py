"""`python -m benchmarks rest`: the REST API of three members beside etcd's JSON gateway, both loaded by wrk.

Writes publish versions with a manifest of a few hundred bytes, each a command of over 300 bytes; etcd puts values of 300 bytes. Reads are
linearizable on both sides; stale reads stand beside etcd's serializable ones. Three processes a side on this machine, fsync, the
authorizer and the metrics on; both sides plain, then both with TLS, our side and the peer taking turns. `--quick` makes one round,
`--plain` leaves TLS out.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import commit, etcd
from benchmarks.harness import emit, note, row
from tests.support.real_cluster import RealCluster, manifest

PEER = "etcd 3.4"
CLIENTS = (1, 16, 64)
SECONDS = 4.0
ROUNDS = 3
BATCH = 100  # items of one batch

_PUT_LUA = """
wrk.headers["content-type"] = "application/json"
wrk.headers["authorization"] = "Bearer {token}"
local body = '{body}'
local n = 0
local id = 0
function setup(thread) thread:set("id", math.random(1, 1000000000)) end
function request()
  n = n + 1
  return wrk.format("PUT", string.format("/v1/models/bench/versions/%d.%d", id, n), nil, body)
end
math.randomseed(os.time())
"""

_BATCH_LUA = """
wrk.headers["content-type"] = "application/json"
wrk.headers["authorization"] = "Bearer {token}"
local manifest = '{body}'
local n = 0
local id = 0
function setup(thread) thread:set("id", math.random(1, 1000000000)) end
function request()
  local items = {{}}
  for i = 1, {items} do
    n = n + 1
    items[i] = string.format('{{"label":"b%d.%d","manifest":%s}}', id, n, manifest)
  end
  return wrk.format("POST", "/v1/models/bench/versions:batch", nil, '{{"items":[' .. table.concat(items, ",") .. "]}}")
end
math.randomseed(os.time())
"""

_GET_LUA = """
wrk.headers["authorization"] = "Bearer {token}"
"""

_SERIALIZABLE_LUA = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{"key":"cmVhZC1tZQ==","serializable":true}'
"""


@dataclass(frozen=True)
class Ours:
    """URLs, the leader's first, and the token of the load."""

    urls: list[str]
    token: str
    tls: etcd.Tls

    def put(self, url: str, clients: int, seconds: float = SECONDS) -> etcd.Load:
        body = json.dumps({"manifest": manifest("bench")}, separators=(",", ":"))
        return etcd.wrk(url, clients, seconds, _PUT_LUA.format(token=self.token, body=body))

    def batch(self, url: str, clients: int, seconds: float = SECONDS) -> float:
        """Items per second."""
        body = json.dumps(manifest("bench"), separators=(",", ":"))
        return BATCH * etcd.wrk(url, clients, seconds, _BATCH_LUA.format(token=self.token, body=body, items=BATCH)).rate

    def get(self, url: str, clients: int, query: str = "", seconds: float = SECONDS) -> etcd.Load:
        return etcd.wrk(f"{url}/v1/models/bench/versions/read-me{query}", clients, seconds, _GET_LUA.format(token=self.token))


@contextlib.contextmanager
def members(plain: bool, tree: Path | None = None) -> Iterator[Ours]:
    """Three members; `tree`: the checkout that they run, this one for None."""
    with tempfile.TemporaryDirectory(prefix="raftmeta-") as folder:
        cluster = RealCluster(Path(folder), prefix=lambda zone: commit.of_tree(tree), plain_api=plain)
        files = sorted(cluster.directory.glob("**/server.toml"))
        assert len(files) == 3, files
        tls = commit.tls_files(files[0])
        for file in files:
            if plain:
                commit.make_plain(file)
            if tree is not None:
                commit.for_earlier(file.parent)
        with cluster:
            cluster.wait_ready()
            first = cluster.leader()
            answer = cluster.put(first, "/v1/models/bench/versions/read-me", {"manifest": manifest("read-me")})
            assert answer.status_code == 201, answer.text
            client = tomllib.loads((cluster.directory / "client.toml").read_text())
            token = (cluster.directory / client["token_file"]).read_text().strip()
            others = [url for zone, url in cluster.urls.items() if zone != first]
            yield Ours([cluster.urls[first], *others], token, tls)
            _compare(cluster)


def _compare(cluster: RealCluster) -> None:
    """What was measured was also right: everybody comes to the same state, and counted the requests."""
    found: list[tuple[int, str]] = []
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        shown = [cluster.get(zone, "/v1/cluster").json() for zone in cluster.servers]
        found = [(each["revision"], each["state_hash"]) for each in shown]
        if len(set(found)) == 1:
            break
        time.sleep(0.1)  # requests that wrk left behind are still being answered
    else:
        raise RuntimeError(f"the members do not agree: {found}")
    for zone in cluster.servers:
        assert "raftmeta_http_request_duration_seconds_count" in cluster.get(zone, "/metrics").text


def main(arguments: list[str]) -> int:
    missing = etcd.available()
    if missing:
        note(missing)
        return 1
    rounds = 1 if "--quick" in arguments else ROUNDS
    for plain in (True,) if "--plain" in arguments else (True, False):
        with members(plain) as ours, etcd.cluster(None if plain else ours.tls) as peer:
            _run(ours, peer, rounds, "" if plain else " tls")
    return 0


def _run(ours: Ours, peer: list[str], rounds: int, suffix: str) -> None:
    leader, follower = ours.urls[0], ours.urls[1]
    for clients in CLIENTS:
        _writes(f"writes c={clients}{suffix}", rounds, partial(ours.put, leader, clients), partial(etcd.writes, peer[0], clients, SECONDS))
    _writes(f"writes follower c=64{suffix}", rounds, lambda: ours.put(follower, 64), lambda: etcd.writes(peer[1], 64, SECONDS))
    for clients in CLIENTS:
        case = f"reads linearizable c={clients}{suffix}"
        _writes(case, rounds, partial(ours.get, leader, clients), partial(etcd.reads, peer[0], clients, SECONDS))
    _writes(f"reads linearizable follower c=64{suffix}", rounds, lambda: ours.get(follower, 64), lambda: etcd.reads(peer[1], 64, SECONDS))
    _writes(
        f"reads stale c=64{suffix}",
        rounds,
        lambda: ours.get(leader, 64, "?consistency=stale"),
        lambda: etcd.wrk(f"{peer[0]}/v3/kv/range", 64, SECONDS, _SERIALIZABLE_LUA).rate,
    )
    items = statistics.median(ours.batch(leader, 4) for _ in range(rounds))
    single = statistics.median(ours.put(leader, 64).rate for _ in range(rounds))
    emit(row("rest", f"batch publish items of {BATCH}{suffix}", "1/s", items, ("per item c=64", single)))


def _writes(case: str, rounds: int, ours: Callable[[], etcd.Load], peer: Callable[[], float]) -> None:
    """Takes turns; the median of each side, and our latency."""
    mine, theirs = [], []
    for turn in range(rounds):
        if turn % 2:
            theirs.append(peer())
            mine.append(ours())
        else:
            mine.append(ours())
            theirs.append(peer())
    emit(row("rest", case, "1/s", statistics.median(load.rate for load in mine), (PEER, statistics.median(theirs))))
    emit(row("rest", f"{case} p50", "ms", statistics.median(load.p50_ms for load in mine)))
    failed = sum(load.failed for load in mine)
    if failed:
        note(f"{case}: {failed} answers of ours were no success")


if __name__ == "__main__":
    raise SystemExit(main([]))
