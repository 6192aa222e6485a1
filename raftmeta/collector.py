"""The cyclic garbage collector of a process that serves.

A full pass over what the libraries built at start takes tens of milliseconds with the interpreter lock held, and the defaults look at the
young generation after 700 allocations, which a hundred requests in flight make at every turn. So what stands when serving begins is frozen,
and a look comes every YOUNG net allocations: 4 ms at most here. The state adds nothing to walk, its records and maps are not tracked.
"""

from __future__ import annotations

import gc

YOUNG = 5_000  # net allocations of tracked objects between two looks


def settle() -> None:
    """Call once, when everything that lasts as long as the process is built."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)
