"""Threads that read and write memory beside requests, and should cost them nothing.

Niceness 19, not SCHED_IDLE: such a thread shares the interpreter's lock with control's loop. On a machine whose processors are all wanted
the kernel runs a SCHED_IDLE thread that holds the lock once in a second or two, and the loop, with the leases that it renews, stands still
until then. At niceness 19 a thread gets some hundredths of a contended processor, and the lock comes back that much sooner.
"""

from __future__ import annotations

import os
import threading
from typing import Final

NICENESS: Final = 19


def give_way() -> None:
    """This thread alone runs behind everybody else from now on. There is no way back without a privilege."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
