"""Raising the feature level: what newer binaries may write once every member understands it.

It rises by one and never falls. Whoever proposes it has asked every member first; a build refuses a level that it does not know, here and
when it reads a snapshot. What a refusal says is kept with its outcome, so it names nothing that differs between builds.
"""

from __future__ import annotations

from raftmeta.core.commands import RaiseFeatureLevel
from raftmeta.core.handlers.checks import Refusal, result
from raftmeta.core.state import SUPPORTED_FEATURE_LEVEL
from raftmeta.core.work import Work


def raise_feature_level(work: Work, body: RaiseFeatureLevel) -> bytes | Refusal:
    now, wanted = work.feature_level, body.level
    if wanted == now:
        return result(level=now)
    if wanted != now + 1 or wanted > SUPPORTED_FEATURE_LEVEL:
        detail = f"feature level {wanted} after {now}; it rises by one and this build knows levels up to {now}"
        return Refusal("feature_level_unsupported", detail)
    work.feature_level = wanted
    return result(level=wanted)
