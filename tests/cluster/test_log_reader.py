"""Whoever reads the log lines of a cluster goes away or hangs: the members go on."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.real_cluster import PROGRAM, RealCluster, Server

pytestmark = pytest.mark.cluster


class PipedServer(Server):
    """A member whose standard error is a pipe."""

    reader = -1

    def start(self) -> None:
        self.reader, writer = os.pipe()
        self.process = subprocess.Popen(
            [*PROGRAM, "server", *self._arguments], stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, start_new_session=True
        )
        self._fill(writer)
        os.close(writer)

    def _fill(self, writer: int) -> None:
        """What many log lines would leave, so that the next one finds no room."""
        other = os.open(f"/proc/self/fd/{writer}", os.O_WRONLY | os.O_NONBLOCK)  # its own flags: the member's end goes on waiting
        for size in (4_096, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(other, b"x" * size)
        os.close(other)

    def text(self) -> str:
        return ""


@pytest.mark.parametrize("reader", ["gone", "hanging"])
def test_a_cluster_whose_log_nobody_reads_outlives_the_loss_of_a_member(tmp_path: Path, reader: str) -> None:
    cluster = RealCluster(tmp_path)
    cluster.servers = {zone: PipedServer(server._arguments, tmp_path / "unused") for zone, server in cluster.servers.items()}
    with cluster:
        if reader == "gone":
            for server in cluster.servers.values():
                os.close(server.reader)  # type: ignore[attr-defined]
        cluster.wait_ready()
        leader = cluster.leader()
        lost, kept = (zone for zone in cluster.servers if zone != leader)
        cluster.servers[lost].kill()  # each survivor has something to say about it
        for number, zone in enumerate((leader, kept, leader, kept)):
            written = cluster.publish(zone, f"1.0.{number}")
            assert written.status_code == 201, written.text
        if reader == "gone":
            assert "raftmeta_lost_log_lines_total 0.0" not in cluster.get(leader, "/metrics").text
        for zone in (leader, kept):
            assert cluster.servers[zone].terminate() == 0
