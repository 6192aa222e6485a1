"""What one command costs in apply: decoding, judging, hashing, the persistent maps. CPU time of one thread, no log around it.

Publish commands of about 500 bytes over 64 models go into a state that already holds `preload` versions, in batches as the log would cut
them. The machine is shared, so each case is the median over rounds of batches, and `best` is the lowest round. The row `sha256 512 B` is
the yardstick that tells how fast the machine was. Arguments: preload (20000) and commands per round (4096).
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator

from benchmarks.harness import emit, row
from raftmeta import codec
from raftmeta.core import commands
from raftmeta.core.apply import apply_batch
from raftmeta.core.state import State
from raftmeta.core.types import Limits, VersionSummary

BENCH = "apply"
MODELS = 64
BEGIN_MS = 1_700_000_000_000
ROUNDS = 7


def publish_command(number: int, manifest_bytes: int = 100) -> bytes:
    """One encoded publish; the same number gives the same bytes."""
    manifest = str(number).encode().rjust(manifest_bytes, b"m")
    a, b, c, d = (hashlib.sha256(f"{part} {number}".encode()).hexdigest() for part in range(4))
    summary = VersionSummary(a, b, c, d, hashlib.sha256(manifest).hexdigest(), 90_868_376 + number, 90_851_328, 6, 104)
    body = commands.Publish(f"model-{number % MODELS}", f"1.0.{number}", summary, manifest)
    stamped_ms = BEGIN_MS + number // 10
    return commands.encode(commands.Command(commands.SCHEMA, f"{stamped_ms}-{number:016x}", "publisher", "member-a", stamped_ms, body))


def preloaded(count: int, limits: Limits | None = None) -> State:
    state = State.empty(limits)
    for begin in range(0, count, 1_000):
        state = apply_batch(state, [publish_command(number) for number in range(begin, min(begin + 1_000, count))]).state
    return state


def measure(state: State, batch: int, commands_per_round: int = 4_096, rounds: int = ROUNDS) -> list[float]:
    """Microseconds of CPU per command in each round; the state grows from round to round."""
    first = state.revision
    samples = []
    for _ in range(rounds):
        payloads = [publish_command(number) for number in range(first, first + commands_per_round)]
        first += commands_per_round
        batches = [payloads[i : i + batch] for i in range(0, commands_per_round, batch)]
        begin = time.process_time()
        for each in batches:
            state = apply_batch(state, each).state
        samples.append((time.process_time() - begin) / commands_per_round * 1e6)
    return samples


def main(arguments: list[str]) -> int:
    preload = int(arguments[0]) if arguments else 20_000
    per_round = int(arguments[1]) if len(arguments) > 1 else 4_096
    state = preloaded(preload)
    for batch in (1, 16, 64, 256, 1_024):
        _report(f"publish batch={batch} versions={preload}", measure(state, batch, per_round))
    full = preloaded(preload, Limits(max_outcomes=max(preload // 2, 1)))
    _report(f"publish batch=64 versions={preload} outcomes full", measure(full, 64, per_round))
    _report("sha256 512 B", list(_rounds(_sha256_us)))
    _report("snapshot per version", list(_rounds(lambda: _snapshot_us(state))))
    return 0


def _report(case: str, samples: list[float]) -> None:
    emit(row(BENCH, case, "us", statistics.median(samples)))
    emit(row(BENCH, f"{case} best", "us", min(samples)))


def _rounds(sample: Callable[[], float]) -> Iterator[float]:
    return (sample() for _ in range(ROUNDS))


def _sha256_us() -> float:
    data = bytes(512)
    begin = time.process_time()
    for _ in range(20_000):
        hashlib.sha256(data).digest()
    return (time.process_time() - begin) / 20_000 * 1e6


def _snapshot_us(state: State) -> float:
    begin = time.process_time()
    for _ in codec.snapshot_chunks(state):
        pass
    return (time.process_time() - begin) / max(len(state.versions), 1) * 1e6
