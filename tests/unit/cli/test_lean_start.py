"""What a command imports before it does anything: each of these took longer than a check of equal roots does."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("numpy", "rich", "pygments", "xml", "torch", "fastapi", "pydantic")


@pytest.mark.parametrize("module", ["consistency.main", "raftmeta.cli.status", "raftmeta.cli.watch", "raftmeta.cli.failover"])
def test_a_command_that_asks_members_begins_without_the_libraries_that_few_need(module: str) -> None:
    told = f"import sys, {module}; import raftmeta.client; print(*sorted(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []
