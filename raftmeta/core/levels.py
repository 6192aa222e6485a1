"""From which feature level on a command may be proposed. Pure.

Members of an earlier build apply what they know of a command, so what they do not know may not be in the log before every member runs a
build that does. `apply` refuses commands above the level alike in every build, but a field that was appended to an older command is applied
by all that can read it; so whoever proposes asks here first.
"""

from __future__ import annotations

from collections.abc import Mapping

from raftmeta.core.apply import HANDLERS
from raftmeta.core.canonical import has_first_policy
from raftmeta.core.commands import Body, DeclareDeployment

DRAIN_LEVEL = 2  # of a policy that says how long requests may keep a slot


def needed_level(body: Body) -> int:
    """The lowest feature level at which every member understands all of this command."""
    level = HANDLERS[type(body)].level
    if isinstance(body, DeclareDeployment) and not has_first_policy(body.policy):
        return max(level, DRAIN_LEVEL)
    return level


def level_fault(body: Body, level: int) -> str:
    """Why this may not be proposed at the level, "" when it may."""
    needed = needed_level(body)
    if needed <= level:
        return ""
    what = "a policy with drain_timeout_ms or drain_overdue" if isinstance(body, DeclareDeployment) else type(body).__name__
    return f"{what} needs feature level {needed}, the cluster is at {level}; `raftmeta cluster raise-level` once all members run this build"


def raise_fault(level: int, features: Mapping[str, int]) -> str:
    """Why the level cannot be raised while the members' builds can run these, "" when it can. 0 stands for a member without a link."""
    away = sorted(member for member, feature in features.items() if not feature)
    older = sorted(f"{member} (up to {feature})" for member, feature in features.items() if 0 < feature < level)
    if older:
        return f"feature level {level} needs every member to run a build that knows it; these do not: {', '.join(older)}"
    if away:
        return f"feature level {level} needs a word of every member, for it cannot be lowered; without a link: {', '.join(away)}"
    return ""
