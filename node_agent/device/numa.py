"""On which memory nodes the pages of a file in shared memory are placed: mbind(2), where the kernel allows it.

The policy belongs to the file, so it is set once, before the pages are allocated, and holds for every process. Containers often forbid the
call; then pages come from wherever the kernel takes them, which costs speed and nothing else, so a refusal is a notice.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Callable, Sequence
from typing import Final

NUMBERS: Final = {"x86_64": 237, "aarch64": 235, "riscv64": 235, "ppc64le": 259, "s390x": 268}
MAX_NODE: Final = 1023
_MPOL_BIND: Final = 2  # pages from these nodes and no others
_WORD_BITS: Final = 64

Syscall = Callable[[int, int, int, object, int], int]  # address, length, mode, mask, bits in it -> 0, or -errno


def system_call() -> Syscall | None:
    """mbind of this kernel, None on a machine whose number is not known."""
    number = NUMBERS.get(platform.machine())
    if number is None:
        return None
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_long, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]

    def mbind(address: int, length: int, mode: int, mask: object, bits: int) -> int:
        done: int = call(number, address, length, mode, ctypes.byref(mask), bits, 0)  # type: ignore[arg-type]
        return done if done >= 0 else -ctypes.get_errno()

    return mbind


def bind(mapping: mmap.mmap, nodes: Sequence[int], syscall: Syscall | None = None) -> str:
    """Place what is not allocated yet of a writable mapping on these nodes. Gives why it was not done, "" when it was."""
    call = syscall or system_call()
    if call is None:
        return f"mbind is not known for machine {platform.machine()!r}"
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    # the kernel reads one bit less than it is told of
    refused = -call(address, len(mapping), _MPOL_BIND, mask_of(nodes), len(mask_of(nodes)) * _WORD_BITS + 1)
    if not refused:
        return ""
    why = {errno.EPERM: "not allowed here (a container?)", errno.EINVAL: "no such memory node, or none that this process may use"}
    return f"mbind to nodes {', '.join(map(str, nodes))}: {why.get(refused, os.strerror(refused))}"


def mask_of(nodes: Sequence[int]) -> ctypes.Array[ctypes.c_uint64]:
    """Bit n of the mask stands for node n."""
    assert nodes and 0 <= min(nodes) <= max(nodes) <= MAX_NODE, nodes
    words = [0] * (max(nodes) // _WORD_BITS + 1)
    for node in nodes:
        words[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    return (ctypes.c_uint64 * len(words))(*words)
