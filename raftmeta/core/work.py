"""A short-lived mutable copy of a state, for the time of one batch.

It exists so that apply stays lean: records change in plain dictionaries, and the persistent maps, the hash and the derived sequences are
brought up to date once per batch. Everything a command changed can be taken back (`undo`), which is how a refusal changes nothing. It never
leaves `apply`, and the state it began from is never touched. Results must not depend on where a batch ends: what a command sees is the same
whether the commands before it were in the batch or in the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256

from raftmeta.core.catalog import Catalog
from raftmeta.core.outcomes import Draft
from raftmeta.core.sequences import SortedKeys
from raftmeta.core.state import DEPLOYMENT, EVIDENCE, MODULUS_MASK, OUTCOME, PAST, ROLLOUT, VERDICT, State, leaf, lengths
from raftmeta.core.tables import Histories, Ledger, Table
from raftmeta.core.types import Deployment, Evidence, Rollout, Verdict, VerdictHistory
from raftmeta.core.usage import Usage


class Serving:
    """The tables of what serves where."""

    __slots__ = ("deployments", "evidence", "history", "past_verdicts", "rollouts", "verdicts")

    def __init__(self, ledger: Ledger, base: State) -> None:
        self.deployments: Table[Deployment] = Table(ledger, base.deployments, DEPLOYMENT, "deployment")
        self.rollouts: Table[Rollout] = Table(ledger, base.rollouts, ROLLOUT, "rollout")
        self.verdicts: Table[Verdict] = Table(ledger, base.verdicts, VERDICT, "verdict")
        self.past_verdicts: Table[VerdictHistory] = Table(ledger, base.past_verdicts, PAST, "")
        self.evidence: Table[Evidence] = Table(ledger, base.evidence, EVIDENCE, "evidence")
        self.history = Histories(ledger, base.history)

    def deployment_names(self, base: State) -> SortedKeys[str]:
        return _grown(base.deployment_names, self.deployments.count, self.deployments.changed, base.deployments)


class Work:
    """The working copy. The clock and the principal are those of the command at hand."""

    __slots__ = (
        "_serving", "_usage", "base", "catalog", "cluster_ms", "feature_level", "keys_after_ms", "ledger", "limits", "oldest_expires_ms",
        "outcomes", "principal",
    )  # fmt: skip

    def __init__(self, base: State) -> None:
        self.base = base
        self.feature_level = base.feature_level
        self.cluster_ms = base.cluster_ms
        self.keys_after_ms = base.keys_after_ms
        self.limits = base.limits
        self.principal = ""
        self.oldest_expires_ms = -1  # when the oldest outcome may be dropped for its age, -1 when that was not looked up yet
        self.ledger = Ledger(base)
        self.catalog = Catalog(self.ledger, base)
        self.outcomes = Draft(base.outcomes)
        self._serving: Serving | None = None
        self._usage: Usage | None = None

    @property
    def revision(self) -> int:
        """Of the command at hand."""
        return self.ledger.revision

    @property
    def serving(self) -> Serving:
        """Made when it is first asked for: most batches publish and nothing else."""
        if self._serving is None:
            self._serving = Serving(self.ledger, self.base)
        return self._serving

    @property
    def usage(self) -> Usage:
        """Who needs which version. Made when it is first asked for."""
        if self._usage is None:
            self._usage = Usage(self.base, self.ledger.events)
        return self._usage

    @property
    def deployments(self) -> Table[Deployment]:
        return self.serving.deployments

    @property
    def rollouts(self) -> Table[Rollout]:
        return self.serving.rollouts

    @property
    def verdicts(self) -> Table[Verdict]:
        return self.serving.verdicts

    @property
    def past_verdicts(self) -> Table[VerdictHistory]:
        return self.serving.past_verdicts

    @property
    def evidence(self) -> Table[Evidence]:
        return self.serving.evidence

    @property
    def history(self) -> Histories:
        return self.serving.history

    def mark(self) -> tuple[int, int, int]:
        """Begin a command: from here `undo` takes back. Earlier changes stand."""
        ledger = self.ledger
        ledger.undo_log.clear()
        return ledger.revision, ledger.size_bytes, len(ledger.events)

    def undo(self, mark: tuple[int, int, int]) -> None:
        """Take back what was put, added and deleted since the mark."""
        ledger = self.ledger
        for table, key, before in reversed(ledger.undo_log):
            table.undo(key, before)
        ledger.undo_log.clear()
        ledger.revision, ledger.size_bytes = mark[0], mark[1]
        del ledger.events[mark[2] :]

    def drop_oldest_outcome(self, key: str, record: bytes) -> None:
        """Its part of the hash goes with it, unless it came in this batch and never had one."""
        self.ledger.size_bytes -= len(key) + len(record)
        if self.outcomes.drop_oldest(key):
            self.ledger.hash_sum -= leaf(OUTCOME, key, record)

    def finish(self) -> State:
        """The state after everything that was done here."""
        base, ledger, serving = self.base, self.ledger, self._serving
        ledger.undo_log.clear()
        ledger.unsettled.clear()  # each table settles itself when it is finished
        for key, record in self.outcomes.fresh():
            name = key.encode()
            leaf_bytes = b"".join((OUTCOME, lengths(len(name), len(record)), name, record))
            ledger.hash_sum += int.from_bytes(sha256(leaf_bytes).digest(), "big")
        versions, catalog = self.catalog.finish()
        return State(
            deployments=serving.deployments.finish() if serving else base.deployments,
            rollouts=serving.rollouts.finish() if serving else base.rollouts,
            verdicts=serving.verdicts.finish() if serving else base.verdicts,
            past_verdicts=serving.past_verdicts.finish() if serving else base.past_verdicts,
            evidence=serving.evidence.finish() if serving else base.evidence,
            history=serving.history.finish() if serving else base.history,
            deployment_names=serving.deployment_names(base) if serving else base.deployment_names,
            revision=ledger.revision,
            generation=base.generation,
            feature_level=self.feature_level,
            cluster_ms=self.cluster_ms,
            keys_after_ms=self.keys_after_ms,
            limits=self.limits,
            catalog=catalog,
            versions=versions,
            outcomes=self.outcomes.finish(),
            model_names=_grown(base.model_names, self.catalog.model_count, self.catalog.models, base.catalog),
            size_bytes=ledger.size_bytes,
            hash_sum=ledger.hash_sum & MODULUS_MASK,
        )


def _grown(names: SortedKeys[str], count: int, changed: Iterable[str], base: Mapping[str, object]) -> SortedKeys[str]:
    """Models and deployments are never deleted, so there are new names only when the count says so."""
    if count > len(names):
        for name in changed:
            if name not in base:
                names = names.added(name)
    return names
