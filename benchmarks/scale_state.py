"""The part of `scale` that needs no log, in a process of its own: a state of many versions made by apply, its snapshot, and back.

`python -m benchmarks.scale_state VERSIONS TENSORS` answers with one line of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time

from benchmarks.manifests import items
from benchmarks.process import rss_mb
from raftmeta import codec
from raftmeta.core.apply import apply
from raftmeta.core.commands import SCHEMA, Command, PublishBatch
from raftmeta.core.state import State

BATCH_BYTES = 2 << 20
BEGIN_MS = 1_700_000_000_000


def main(arguments: list[str]) -> int:
    versions, tensors = (int(each) for each in arguments)
    state, spent = State.empty(), 0.0
    gc.collect()
    before = rss_mb(os.getpid())
    for number, batch in enumerate(items("state", versions, tensors, BATCH_BYTES)):
        command = Command(SCHEMA, f"{BEGIN_MS + number}-fill", "admin", "a", BEGIN_MS + number, PublishBatch(batch))
        began = time.perf_counter()
        state = apply(state, command).state
        spent += time.perf_counter() - began
    del batch, command
    gc.collect()
    after = rss_mb(os.getpid())
    began = time.perf_counter()
    chunks = list(codec.snapshot_chunks(state))
    written = time.perf_counter() - began
    began = time.perf_counter()
    restored = codec.restore(chunks)
    read = time.perf_counter() - began
    assert restored.state_hash == state.state_hash and len(state.versions) == versions
    answer = {
        "rss_bytes": (after - before) * 1e6 / versions,
        "state_bytes": state.size_bytes / versions,
        "apply_us": spent / versions * 1e6,
        "snapshot_bytes": sum(map(len, chunks)),
        "snapshot_s": written,
        "restore_s": read,
    }
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
