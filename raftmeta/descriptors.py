"""How many files this process may have open: connections are files, and a limit that libraries chose is raised before it is refused."""

from __future__ import annotations

import resource


def raised_limit(needed: int) -> int:
    """The soft limit, raised to `needed` as far as the hard one allows; `needed` where there is none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return needed if soft == resource.RLIM_INFINITY else soft
    raised = needed if hard == resource.RLIM_INFINITY else max(soft, min(needed, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return raised
