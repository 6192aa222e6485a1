"""Tells the control plane which bytes this node serves with: when that changes, and now and then when they were compared last.

What is told comes from the engine that serves, which looks at no bytes for it. Nothing is told before this process has compared something,
so what the node told before its last start stays until then, under that start's boot id. A node that stops serving what it told says so.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from node_agent.beside import Beside
from node_agent.journal import DeploymentRecord
from node_agent.runtime import log
from node_agent.serving import Evidence
from raftmeta.core.errors import ErrorClass, RaftmetaError

LOOK_S = 1.0
AGAIN_MS = 900_000  # between two words of which at most the times differ: each takes a place in the replicated log
SOON_MS = 60_000  # until the first word of a boot is told again: one of the boot before that was held up may have come behind it
REFUSED_MS = 60_000  # until a word that was refused is tried again: a feature level may be raised, a role may be given


class Plane(Protocol):
    async def record_evidence(self, node: str, evidence: Mapping[str, Any]) -> object: ...


class Serving(Protocol):
    def evidence(self) -> Evidence | None: ...


class Remembered(Protocol):
    @property
    def record(self) -> DeploymentRecord: ...


class Tended(Protocol):
    """A deployment on this node."""

    @property
    def remembered(self) -> Remembered: ...

    @property
    def serving(self) -> Serving: ...


class Told(NamedTuple):
    word: Mapping[str, Any]  # without its times
    at_ms: int  # of this node's monotonic clock
    again_ms: int  # when the same is due again
    is_taken: bool  # by the members, this word or one before it in this boot


class Teller:
    def __init__(self, node: str, boot_id: str, beside: Beside, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._node, self._boot_id = node, boot_id
        self._clock_ns = clock_ns
        self._told: dict[str, Told] = {}  # by deployment
        self._beside = beside
        self._refused: dict[str, str] = {}  # by deployment: why its last word was refused

    async def run(self, plane: Plane, tended: Callable[[], Mapping[str, Tended]], look_s: float = LOOK_S) -> None:
        """Until cancelled."""
        while True:
            await self.tell(plane, tended())
            await asyncio.sleep(look_s)

    async def tell(self, plane: Plane, tended: Mapping[str, Tended]) -> None:
        """Whatever is due now. `tended` may change meanwhile."""
        for gone in self._told.keys() - tended.keys():
            del self._told[gone]
        for name in sorted(tended):
            each = tended.get(name)  # it may have left this node since
            found = None if each is None else each.serving.evidence()
            if each is not None and (found is not None or name in self._told):
                await self._look(plane, each.remembered.record, found)

    async def _look(self, plane: Plane, record: DeploymentRecord, found: Evidence | None) -> None:
        try:
            word = await asyncio.to_thread(self._word, record, found)
        except (RaftmetaError, OSError) as fault:  # a manifest that cannot be read: the store finds that out by itself
            self._refuse(record.name, str(fault))
        else:
            await self._tell(plane, record.name, word, found)

    async def _tell(self, plane: Plane, name: str, word: Mapping[str, Any], found: Evidence | None) -> None:
        now_ms = self._clock_ns() // 1_000_000
        age_ms = 0 if found is None else min(found.verified_age_ms, now_ms)
        told = self._told.get(name)
        if told is not None and (now_ms < told.again_ms if told.word == word else now_ms <= told.at_ms):
            return  # what a boot tells is in the order of this clock
        try:
            await plane.record_evidence(self._node, {**word, "told_ms": now_ms, "verified_age_ms": age_ms})
        except RaftmetaError as error:
            if error.info.error_class is ErrorClass.UNAVAILABLE:
                return  # the next look tries again
            self._refuse(name, str(error))
            self._told[name] = Told(word, now_ms, now_ms + REFUSED_MS, told is not None and told.is_taken)
            return
        self._refused.pop(name, None)
        self._told[name] = Told(word, now_ms, now_ms + (AGAIN_MS if told is not None and told.is_taken else SOON_MS), True)
        log.info("evidence_told", deployment=name, version=word["version"], finding=word["finding"])

    def _refuse(self, name: str, why: str) -> None:
        """Logged when it changes, not each time it is met again."""
        if self._refused.get(name) != why:
            log.warning("evidence_not_told", deployment=name, reason=why)
        self._refused[name] = why

    def _word(self, record: DeploymentRecord, found: Evidence | None) -> dict[str, Any]:
        """The body of a record of evidence without its times."""
        order = {"generation": record.fence.generation, "order_revision": record.fence.revision}
        word: dict[str, Any] = {"deployment": record.name, "boot_id": self._boot_id, **order, "version": "", "finding": ""}
        if found is None:
            return word
        digests = self._digests_of(found.record.checksum)
        return word | {
            "version": found.record.version,
            "checksum": found.record.checksum,
            "vector_root": found.record.vector_root,
            "vector_from": found.vector_from.value,
            "derived_digest": derived_digest(found.derived),
            "finding": found.finding,
            **digests,
        }

    def _digests_of(self, checksum: str) -> dict[str, str]:
        """Of the files as they lie there now; none when the manifest is not there."""
        found = self._beside.digests(checksum)
        return {} if found is None else {"config_digest": found.config, "tokenizer_digest": found.tokenizer}


def derived_digest(derived: Mapping[str, str]) -> str:
    """SHA-256 over name and digest of each tensor outside the slot in order of name, lengths first; "" when there are none."""
    sha = hashlib.sha256(b"raftmeta derived 1\0")
    for name, digest in sorted(derived.items()):
        data = name.encode()
        sha.update(b"%d:%b%d:%b" % (len(data), data, len(digest), digest.encode()))
    return sha.hexdigest() if derived else ""
