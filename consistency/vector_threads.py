"""The vector on several threads: a backend that hands ranges of blocks to a pool and is used as every other.

Block checks depend on nothing but their block, so how the blocks are shared changes nothing: the result equals that of one thread, bit
for bit. Gains need a kernel that lets the interpreter lock go, as the compiled one and NumPy's do. Few blocks stay on the caller's thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from consistency import vector
from consistency.vector import WORDS, Backend, Kernel, Words
from raftmeta.core.errors import RaftmetaError

MAX_THREADS: Final = 256
LEAST_BLOCKS: Final = 16  # 1 MiB for a thread, about 100 us of work against about 20 us to hand it over


@contextmanager
def threaded(threads: int, using: Backend | None = None, least_blocks: int = LEAST_BLOCKS) -> Iterator[Backend]:
    """A checked backend that computes on up to `threads` threads, this one included, until the block ends. Raises RaftmetaError bad_field.

    One call at a time makes use of all of them; calls from several threads share them.
    """
    if not 1 <= threads <= MAX_THREADS:
        raise RaftmetaError("bad_field", f"the vector is computed on 1 to {MAX_THREADS} threads, found {threads}")
    chosen = using or vector.backend()
    if threads == 1:
        yield chosen
        return
    name = f"{chosen.name} on {threads} threads"
    with ThreadPoolExecutor(threads - 1, "vector") as pool:
        made = _Shared(chosen.kernel, pool, threads, least_blocks)
        vector.self_check(Backend(name, replace(made, least_blocks=1), chosen.byteorder))  # the stored vectors have few blocks
        yield Backend(name, made, chosen.byteorder)


@dataclass(frozen=True)
class _Shared:
    """A kernel whose blocks are shared between the caller's thread and a pool's; see consistency.vector.Kernel."""

    kernel: Kernel
    pool: ThreadPoolExecutor
    threads: int
    least_blocks: int  # for one thread

    def __call__(self, words: Words, native_keys: Words, swapped_keys: Words, out: Words) -> None:
        blocks = out.shape[0]
        step = max(self.least_blocks, -(-blocks // self.threads))

        def compute(first: int) -> None:
            part = words[first * WORDS : (first + step) * WORDS]
            self.kernel(part, native_keys, swapped_keys, out[first : first + step])

        others = [self.pool.submit(compute, first) for first in range(step, blocks, step)]
        try:
            compute(0)
        finally:
            wait(others)  # the memory is the caller's: nobody may use it after the return
        for other in others:
            other.result()
