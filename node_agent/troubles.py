"""Why deployments of this node cannot be followed, taken over or given up: each by itself, and tried again by who met it.

For status and log: said once when it changes, not each time it is met again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from node_agent.runtime import log


class Troubles:
    def __init__(self) -> None:
        self._known: dict[str, dict[str, str]] = {}  # by deployment and by what is in trouble

    def __bool__(self) -> bool:
        return bool(self._known)

    def note(self, deployment: str, what: str, why: str) -> None:
        """`why` is "" once it is over."""
        known = self._known.get(deployment, {})
        if why and known.get(what) != why:
            log.error("deployment_not_followed", deployment=deployment, what=what, reason=why)
        now = {other: said for other, said in known.items() if other != what} | ({what: why} if why else {})
        self._known.pop(deployment, None)
        if now:
            self._known[deployment] = now

    def note_all(self, what: str, why: Mapping[str, str]) -> None:
        """Of every deployment; one that is not named has no such trouble any more."""
        for deployment in {*self._known, *why}:
            self.note(deployment, what, why.get(deployment, ""))

    def keep_only(self, stays: Callable[[str], bool]) -> None:
        """Forget those of deployments that are none of this node's any more."""
        self._known = {name: known for name, known in self._known.items() if stays(name)}

    def of(self, deployment: str) -> str:
        return "; ".join(f"{what}: {why}" for what, why in sorted(self._known.get(deployment, {}).items()))

    def others(self, known: Mapping[str, object]) -> dict[str, str]:
        """Of the deployments that are not among these."""
        return {name: self.of(name) for name in sorted(self._known) if name not in known}
