"""What the collector is told, in a process of its own, since it cannot be taken back."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from raftmeta import collector

kept = [[] for _ in range(10_000)]
collector.settle()
assert gc.get_freeze_count() > 10_000, gc.get_freeze_count()
assert gc.get_threshold()[0] == collector.YOUNG
assert gc.isenabled()
"""


def test_what_stands_at_the_start_is_not_walked_again_and_garbage_still_is_found() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=30)
