"""A memory barrier that one thread executes on behalf of all others: membarrier(2).

The switch stores the active slot and then reads the workers' counts; a worker stores its count and then reads the active slot. Every
processor, x86 included, may let the load overtake the store, and then both miss each other. With this call in the rare side the frequent
side needs no barrier of its own. GLOBAL_EXPEDITED interrupts the processors that run a registered process (microseconds), GLOBAL waits for
a grace period (milliseconds). Without either we refuse to start: there is no safe third way from Python.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable
from enum import IntEnum
from typing import Final

from node_agent.refusal import Refusal

NUMBERS: Final = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365, "s390x": 356}
_QUERY: Final = 0
_REGISTER_GLOBAL_EXPEDITED: Final = 1 << 2

Syscall = Callable[[int], int]  # command -> result, or -errno


class Kind(IntEnum):
    """The membarrier command in use. The two sides of a control block must agree, so it stands in the block."""

    GLOBAL = 1 << 0
    GLOBAL_EXPEDITED = 1 << 1


def system_call() -> Syscall:
    """membarrier of this kernel. The expedited command keeps the interpreter lock: getting it back could take 5 ms, the call takes µs."""
    number = NUMBERS.get(platform.machine())
    if number is None:
        raise Refusal("barrier_unavailable", "membarrier", f"one of {', '.join(NUMBERS)}", f"machine {platform.machine()!r}")
    keeping_lock = ctypes.PyDLL(None, use_errno=True).syscall
    releasing_lock = ctypes.CDLL(None, use_errno=True).syscall
    for call in (keeping_lock, releasing_lock):
        call.restype = ctypes.c_long
        call.argtypes = [ctypes.c_long] * 4

    def membarrier(command: int) -> int:
        call = releasing_lock if command == Kind.GLOBAL else keeping_lock
        done: int = call(number, command, 0, 0)
        return done if done >= 0 else -ctypes.get_errno()

    return membarrier


class Membarrier:
    """Registered for this process when constructed; `__call__` is the barrier."""

    def __init__(self, kind: Kind | None = None, syscall: Syscall | None = None) -> None:
        """`kind` None takes the fastest that the kernel offers. Raises Refusal barrier_unavailable."""
        self._syscall = system_call() if syscall is None else syscall
        offered = self._offered()
        self.kind = _choose(offered, kind)
        self.pid = os.getpid()
        if self.kind is Kind.GLOBAL_EXPEDITED:
            self._must(_REGISTER_GLOBAL_EXPEDITED, "registration for GLOBAL_EXPEDITED")

    def __call__(self) -> None:
        self._must(self.kind, f"membarrier {self.kind.name}")

    def _offered(self) -> int:
        offered = self._syscall(_QUERY)
        if offered < 0:
            reason = errno.errorcode.get(-offered, str(-offered))
            raise Refusal("barrier_unavailable", "membarrier query", "a mask (kernel >= 4.3, allowed by seccomp)", reason)
        return offered

    def _must(self, command: int, what: str) -> None:
        result = self._syscall(command)
        if result < 0:
            raise Refusal("barrier_unavailable", what, "success", errno.errorcode.get(-result, str(-result)))


def _choose(offered: int, kind: Kind | None) -> Kind:
    expedited = Kind.GLOBAL_EXPEDITED | _REGISTER_GLOBAL_EXPEDITED
    if kind is not Kind.GLOBAL and offered & expedited == expedited:
        return Kind.GLOBAL_EXPEDITED
    if kind is not Kind.GLOBAL_EXPEDITED and offered & Kind.GLOBAL:
        return Kind.GLOBAL
    wanted = "GLOBAL_EXPEDITED or GLOBAL" if kind is None else kind.name
    raise Refusal("barrier_unavailable", "membarrier", f"{wanted} (kernel >= 4.16 / 4.3, no nohz_full)", f"mask {offered:#x}")
