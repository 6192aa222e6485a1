"""From what the disk holds to what a replica starts with (D2, D6, R13). Refuses rather than start on less than was acknowledged."""

from __future__ import annotations

import msgspec

from raftmeta import codec
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.state import State
from raftmeta.log import configuration as cfg
from raftmeta.log.configuration import Configuration
from raftmeta.log.journal import Journal, Reach
from raftmeta.log.setup import OP_MEMBERSHIP
from raftmeta.log.snapshots import SnapshotMeta, SnapshotStore

SCAN_BYTES = 4 << 20


class Recovered(msgspec.Struct, frozen=True):
    state: State
    applied_index: int
    configurations: tuple[tuple[int, Configuration], ...]  # by index; the last one is in force
    bootstrap: bool  # nothing in the log yet: the members of the one-time marker form the cluster
    joining: bool  # no vote yet, see hard_state.py
    snapshot: SnapshotMeta | None


class StateLoader:
    """Reads the newest sound snapshot once, for two who ask: the journal, whether it goes on from there, and then the recovery."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store
        self._loaded: tuple[int, tuple[SnapshotMeta, State] | None] | None = None

    def check(self, reach: Reach) -> None:
        """Raises RaftmetaError integrity when a journal of that reach does not go on from what the snapshots hold, or ends before it."""
        self._loaded = reach.first_index, self._store.load(reach.first_index, codec.restore)
        found = self._loaded[1]
        if found is not None and found[0].index > reach.last_index:
            _check_awaited(found[0], reach.last_index, reach.awaited)

    def take(self, first_index: int) -> tuple[SnapshotMeta, State] | None:
        """What was found for that journal a moment ago, else what is there now."""
        loaded, self._loaded = self._loaded, None
        return loaded[1] if loaded is not None and loaded[0] == first_index else self._store.load(first_index, codec.restore)


def recover(journal: Journal, snapshots: StateLoader, marker: Configuration | None, *, boot_from_log: bool = True) -> Recovered:
    """Reconcile journal and snapshot by (index, term). Raises RaftmetaError integrity when they leave a gap or cannot be read.

    `marker` is what `init` wrote for the first start; it counts only while neither journal nor snapshot names a configuration. Without
    any of the three the member belongs to no cluster yet: it waits to be told and never stands for election.
    """
    found, meta = snapshots.take(journal.first_index), None
    state, base = State.empty(), (0, Configuration())
    if found is not None:
        meta, state = found
        base = (meta.index, _configuration(meta.config, f"snapshot {meta.index}"))
        if journal.last_index < meta.index or journal.term_at(meta.index) not in (None, meta.term):
            _check_awaited(meta, journal.last_index, journal.awaited)
            journal.reset(meta.index, meta.term)  # the crash came between the snapshot and the reset of the journal
            journal.sync()
    applied = base[0]
    if journal.first_index - 1 > applied:
        raise RaftmetaError(
            "integrity",
            f"the journal starts at {journal.first_index}, the newest sound snapshot ends at {applied}: entries are missing between them",
        )
    configurations = [base, *_configurations_in(journal, applied + 1)]
    named = any(configuration.members for _, configuration in configurations)
    if marker is not None and (not named or not boot_from_log):
        return Recovered(state, applied, ((applied, marker),), not named, journal.joining, meta)
    return Recovered(state, applied, tuple(configurations), False, journal.joining, meta)


def _check_awaited(meta: SnapshotMeta, last_index: int, awaited: tuple[int, int]) -> None:
    """A snapshot takes the journal's place only if the journal was to make room for it: else one of the two is another time's."""
    if (meta.index, meta.term) != awaited:
        raise RaftmetaError(
            "integrity",
            f"snapshot {meta.index} of term {meta.term} is not in the journal, which ends at {last_index} and awaits "
            + (f"snapshot {awaited[0]} of term {awaited[1]}" if awaited[0] else "none"),
        )


def _configurations_in(journal: Journal, index: int) -> list[tuple[int, Configuration]]:
    found: list[tuple[int, Configuration]] = []
    while index <= journal.last_index:
        for index, _, payload in journal.entries(index, journal.last_index + 1, SCAN_BYTES):  # noqa: B020 - goes on after the last one seen
            if payload[0] == OP_MEMBERSHIP:
                found.append((index, _configuration(payload[1:], f"entry {index}")))
        index += 1
    return found


def _configuration(data: bytes, where: str) -> Configuration:
    try:
        return cfg.decode(data)
    except msgspec.MsgspecError as cause:
        raise RaftmetaError("integrity", f"{where}: the configuration cannot be read: {cause}") from cause
