"""Another process with its own hash seed that applies what it is sent and answers with digests of what came of it.

`python -m tests.support.replica` is that process; `Replica` starts one and talks to it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from struct import Struct

from raftmeta.core.apply import apply_batch
from raftmeta.core.state import State
from tests.support.commands import SMALL, snapshot

ROOT = Path(__file__).parents[2]
BATCH = 7
ANSWER_BYTES = 64

_REQUEST = Struct("<BI")  # whether the small limits apply, number of payloads
_LENGTH = Struct("<I")


def digests(state: State) -> bytes:
    return hashlib.sha256(snapshot(state)).digest() + state.state_hash


class Replica:
    def __init__(self, seed: int) -> None:
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        command = [sys.executable, "-m", "tests.support.replica"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT)

    def apply(self, small: bool, payloads: list[bytes]) -> bytes:
        assert self._process.stdin and self._process.stdout
        framed = b"".join(_LENGTH.pack(len(payload)) + payload for payload in payloads)
        self._process.stdin.write(_REQUEST.pack(small, len(payloads)) + framed)
        self._process.stdin.flush()
        return self._process.stdout.read(ANSWER_BYTES)

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


def main() -> None:
    read, answer = sys.stdin.buffer.read, sys.stdout.buffer
    while header := read(_REQUEST.size):
        small, count = _REQUEST.unpack(header)
        payloads = [read(_LENGTH.unpack(read(_LENGTH.size))[0]) for _ in range(count)]
        state = State.empty(SMALL if small else None)
        for begin in range(0, count, BATCH):
            state = apply_batch(state, payloads[begin : begin + BATCH]).state
        answer.write(digests(state))
        answer.flush()


if __name__ == "__main__":
    main()
