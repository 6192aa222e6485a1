"""`raftmeta server` with no configuration: one durable development member."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from benchmarks.etcd import free_ports
from tests.support.real_cluster import PROGRAM, RealCluster, Server, development, manifest, wait_ready

pytestmark = pytest.mark.cluster


def test_single_member_keeps_every_acknowledged_write_over_kill_9(tmp_path: Path) -> None:
    with development(tmp_path, free_ports(1)[0]) as (server, client):
        acknowledged: dict[str, int] = {}
        for turn in range(3):
            server.start()
            wait_ready(client)
            for number in range(40):
                label = f"{turn}.{number}"
                answer = client.put(f"/v1/models/m/versions/{label}", json={"manifest": manifest(label)})
                assert answer.status_code == 201, answer.text
                acknowledged[label] = int(answer.headers["X-Raftmeta-Revision"])
            server.kill()
        server.start()
        wait_ready(client)
        for label, revision in acknowledged.items():
            found = client.get(f"/v1/models/m/versions/{label}").json()
            assert found["published_revision"] == revision
        assert "Development member" in server.text()


def test_single_member_refuses_a_second_process_on_its_directory(tmp_path: Path) -> None:
    with development(tmp_path, free_ports(1)[0]) as (server, client):
        server.start()
        wait_ready(client)
        before = client.get("/v1/cluster").json()["revision"]
        second = subprocess.run(
            ["env", f"RAFTMETA_API__LISTEN=127.0.0.1:{free_ports(1)[0]}", *PROGRAM, "server", "--data-dir", str(tmp_path / "data")],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert second.returncode != 0
        assert "is in use by process" in second.stderr and "Traceback" not in second.stderr
        assert client.get("/v1/cluster").json()["revision"] == before


def test_single_member_listens_on_loopback_only(tmp_path: Path) -> None:
    refused = subprocess.run(
        ["env", "RAFTMETA_API__LISTEN=0.0.0.0:7400", *PROGRAM, "server", "--data-dir", str(tmp_path / "data")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert refused.returncode == 3
    assert "not loopback" in refused.stderr
    assert not (tmp_path / "data").exists()


def test_an_empty_data_directory_never_forms_a_cluster_by_itself(tmp_path: Path) -> None:
    cluster = RealCluster(tmp_path)
    marker = next((cluster.directory / "a").rglob("bootstrap"))
    marker.unlink()
    server = Server(["--config", str(cluster.directory / "a" / "server.toml")], tmp_path / "a.log")
    server.start()
    try:
        for _ in range(3):
            status = _cluster_status(cluster)
            assert status["members"] == [] and status["term"] == 0 and status["role"] == "follower"
            assert status["caught_up"] is False
        refused = cluster.publish("a", "v1")
        assert refused.status_code == 503 and refused.json()["code"] == "starting"
        assert "belongs to no cluster" in refused.json()["detail"]
        assert cluster.get("a", "/v1/models?consistency=stale").json()["code"] == "starting"
        assert "no_cluster_yet" in server.text()
    finally:
        server.kill()


def _cluster_status(cluster: RealCluster) -> dict[str, object]:
    found: dict[str, object] = {}
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            found = cluster.get("a", "/v1/cluster?consistency=stale").json()
            if "members" in found:
                return found
        time.sleep(0.1)
    raise AssertionError(found)


def test_strangers_who_hold_connections_leave_a_member_the_descriptors_that_its_log_needs(tmp_path: Path) -> None:
    limit, port = 400, free_ports(1)[0]
    limited = ("sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh")
    with development(tmp_path, port, limited) as (server, client), contextlib.ExitStack() as strangers:
        server.start()
        wait_ready(client)
        for _ in range(2 * limit):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port), 5))
        assert client.put("/v1/models/m/versions/1", json={"manifest": manifest("1")}).status_code == 201
        assert server.process is not None
        held = len(os.listdir(f"/proc/{server.process.pid}/fd"))  # noqa: PTH208 - a count, no paths
        assert limit // 5 < held < limit - 64
