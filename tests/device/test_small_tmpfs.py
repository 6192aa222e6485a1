"""An arena on a file system that is too small for it: refused by the check, and by the allocation when the check was passed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from node_agent.device import arena as arena_module
from node_agent.device.arena import Arena, ArenaHeader
from node_agent.device.process import this_process
from node_agent.refusal import Refusal
from raftmeta.core.errors import ErrorClass
from tests.support.shm import line_of, python_process

pytestmark = pytest.mark.device


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "small", str(tmp_path)], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_an_arena_that_does_not_fit_is_refused_with_the_numbers_and_the_setting(small: Path) -> None:
    with pytest.raises(
        Refusal, match=rf"no_headroom.*4259840 bytes.*1048576 bytes left in the file system of {small} \(mount option size="
    ) as caught:
        Arena.create(small / "arena", 2 << 20)
    assert caught.value.error_class is ErrorClass.CAPACITY
    assert list(small.iterdir()) == []
    Arena.create(small / "arena", 128 << 10).close()


def test_room_that_vanishes_between_check_and_allocation_is_refused_and_nothing_is_left(small: Path) -> None:
    header = ArenaHeader(arena_module.FORMAT, "id", "boot", 2 << 20, this_process())
    with pytest.raises(Refusal, match=r"no_headroom.*ENOSPC from posix_fallocate.*mount option size="):
        arena_module._allocate(small / "arena", header, ())
    assert list(small.iterdir()) == []


LIMITED = """
import resource, sys
from pathlib import Path
from node_agent.device.arena import Arena
from node_agent.refusal import Refusal
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    Arena.create(Path(sys.argv[1]), 2 << 20)
except Refusal as refusal:
    print(refusal, flush=True)
"""


def test_a_file_size_limit_of_the_process_is_named(shm: Path) -> None:
    with python_process(LIMITED, str(shm / "arena")) as process:
        assert "1048576 bytes left in the file size limit of this process (RLIMIT_FSIZE, systemd LimitFSIZE=)" in line_of(process)
    assert list(shm.iterdir()) == []


def test_the_memory_of_what_is_replaced_and_used_by_nobody_counts_as_room_for_the_new_one(small: Path) -> None:
    Arena.create(small / "arena", 320 << 10).close()
    Arena.create(small / "arena", 384 << 10).close()
    reader = Arena.open(small / "arena")
    with pytest.raises(Refusal, match="no_headroom"):
        Arena.create(small / "arena", 320 << 10)
    assert reader.slot_bytes == 384 << 10
    assert reader.slot_view(0)[0] == 0, "who reads the old one is not disturbed"
    reader.close()
