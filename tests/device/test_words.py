"""A word of the control block is read whole, whatever its writer does meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from node_agent.device.control_block import ControlBlock, row_start
from tests.support.shm import line_of, python_process

pytestmark = pytest.mark.device

BATCH = 100_000
MAX_BATCHES = 10_000  # until the writer was seen to run beside the reader

WRITER = """
import sys
from pathlib import Path
from node_agent.device.control_block import ControlBlock
words = ControlBlock.open(Path(sys.argv[1])).words
at = int(sys.argv[2])
print("ready", flush=True)
while True:
    words[at] = 0xFFFFFFFFFFFFFFFF
    words[at] = 0
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two processors are needed")
def test_no_reader_ever_sees_half_of_a_word(shm: Path) -> None:
    block = ControlBlock.create(shm / "control")
    at = row_start(3)
    with python_process(WRITER, str(block.path), str(at)) as writer:
        assert line_of(writer) == "ready"
        words = block.words
        seen: set[int] = set()
        deadline = time.monotonic() + 60
        for _ in range(MAX_BATCHES):
            seen.update(words[at] for _ in range(BATCH))
            if len(seen) > 1 or time.monotonic() > deadline:
                break
        seen.update(words[at] for _ in range(10 * BATCH))
    assert seen == {0, 2**64 - 1}
