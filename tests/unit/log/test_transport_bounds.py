"""What a transport holds is bounded: a peer that reads nothing, and a process without file descriptors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from raftmeta.log import messages as m
from raftmeta.log.transport import Disconnected
from tests.support.mesh import Mesh

CHUNK = m.Gossip("fill", bytes(1 << 20))


def test_a_peer_that_reads_nothing_fills_its_queue_to_the_bound_and_others_go_on(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        bound = 20 << 20
        a, b, _ = mesh.trio(queue_bytes=bound)
        b.polled = False
        refused = 0
        for _ in range(100):
            refused += not a.transport.send("b", CHUNK)
            a.events += a.transport.poll(0.0)
            assert a.transport.queued_bytes("b") <= bound
        assert refused > 50, "back-pressure reaches the caller"
        assert a.count("queue_full") == refused
        assert a.transport.queued_bytes("b") > bound - 2 * len(CHUNK.data)
        mesh.talk("a", "c")
        mesh.talk("c", "a")
        b.polled = True
        mesh.pump(lambda: a.transport.queued_bytes("b") == 0)
        mesh.pump(lambda: len(b.received()) == 100 - refused)
        assert a.transport.send("b", CHUNK)


def test_a_peer_that_takes_nothing_for_long_is_dropped_with_its_queue(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a, b, _ = mesh.trio(stall_s=10.0)
        b.polled = False
        for _ in range(30):
            a.transport.send("b", CHUNK)
        mesh.turns(5)
        assert a.transport.queued_bytes("b") > 0
        a.clock.advance(10.1)
        mesh.turns(2)
        assert Disconnected("b") in a.events
        assert a.transport.queued_bytes("b") == 0
        assert not a.transport.send("b", CHUNK)
        mesh.talk("a", "c")


def test_a_slow_reader_that_makes_progress_is_kept(tmp_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        a, b, _ = mesh.trio(stall_s=10.0)
        b.polled = False
        sent = 0
        for _ in range(30):
            sent += a.transport.send("b", CHUNK)
        for _ in range(60):
            a.clock.advance(4.0)
            b.events += b.transport.poll(0.0)
            mesh.turn()
        assert Disconnected("b") not in a.events
        assert len(b.received()) == sent


def test_without_file_descriptors_the_listener_stays_and_takes_members_again_later(tmp_path: Path) -> None:
    """In a process of its own, for the limit holds for a whole process."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.descriptor_drought", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "ok" in result.stdout
