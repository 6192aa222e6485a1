"""How much memory a process holds beside files and shared memory."""

from __future__ import annotations


def private_bytes() -> int:
    """Anonymous resident memory of this process (RssAnon)."""
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0
