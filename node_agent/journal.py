"""What a node must remember: one small checked file in the store directory, replaced as a whole.

Control writes it before it acts on it; workers and the front read it, so they can restart while control is away. Per deployment: the
highest order obeyed (the fence), the version that served here last (the pin), and how far the running rollout came with what it cost. A
file that does not check keeps control from starting: from an empty state it would obey old orders. A control process that runs looks at
the file now and then and writes it again when it is not its own; whoever reads it goes by what it read last.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

import msgspec

from node_agent.failure import Failure
from node_agent.messages import Measured
from node_agent.plan import Order, Pinned, Target
from node_agent.runtime import log
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import SideName, StageCounters
from raftmeta.durable import DiskFull, OsDisk, read_file, write_file

FORMAT = "raftmeta-node-2"
NAME = "node.state"
MAX_PROOFS = 4
RESERVE_BYTES = 256 << 10


class LoadPhase(StrEnum):
    """How far a version came on this node within one rollout. In this order, and never back."""

    INIT = "init"  # the rollout was seen
    VERIFIED = "verified"  # every byte is in the store or in the slot that serves, by its digest
    UNPACKED = "unpacked"  # in its slot, whose vector is that of the manifest
    MAPPED = "mapped"  # the prober made a module of the slot that answered as it was published
    VALIDATED = "validated"  # every worker has bound and warmed it


LOAD_PHASES = tuple(LoadPhase)


class ChangeRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rollout this node works on, or worked on last."""

    id: str = ""
    counters: StageCounters = StageCounters()
    failure: Failure = Failure()  # set when it failed here
    reached: LoadPhase = LoadPhase.INIT


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the prober saw of a version on this node."""

    checksum: str
    kernel: str  # what computed it; another one proves nothing of this
    warm_ms: int
    peak_bytes: int
    derived: dict[str, str]
    measured: tuple[Measured, ...]


class DeploymentRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fields that have their defaults are not written, so an earlier build reads it as long as nothing new is said."""

    name: str
    model: str
    side: SideName
    arena: str  # file names in the arena directory
    control_block: str
    fence: Order = Order(0, 0)
    obeyed: Target | None = None  # what the order of the fence named; written before the switch
    pin: Target | None = None  # verified and served here last; what a start without control plane serves
    pinned: Pinned | None = None  # by an operator: serves whatever is ordered
    behind: bool = False  # the committed version is not on this node yet: not ready, though the old one serves
    change: ChangeRecord = ChangeRecord()
    proofs: tuple[Proof, ...] = ()  # the newest last, at most MAX_PROOFS
    serving_side: SideName | None = None  # that a fail-over named last, None while none was heard of
    serving_order: Order = Order(0, 0)  # of that decision: an older one does not take it back
    order_seen_ns: int = 0  # monotonic clock when the order of the fence was seen, 0 once every worker answered
    lag_ms: int = -1  # of the last switch: order seen to all workers answering
    leaving: bool = False  # it no longer lists this node: nobody answers for it, and its memory is being given back
    damage: str = ""  # what was found wrong in the memory that serves, until it is whole again; not ready meanwhile

    @property
    def fenced_by(self) -> SideName | None:
        """The side that takes requests in place of this node's own, None while this one may answer."""
        return None if self.serving_side in (None, self.side) else self.serving_side


class NodeRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node: str
    format: str = FORMAT
    deployments: dict[str, DeploymentRecord] = {}
    cluster_id: str = ""  # of the control plane that this node listens to, once it heard one
    cordoned: str = ""  # why an operator took the node out of readiness, "" when nobody did


class Journal:
    """Control's copy of the file: `record` is what is on the disk, and what was noted since. May be used from any thread."""

    def __init__(self, directory: Path, node: str) -> None:
        self._path = directory / NAME
        self._reserve = directory / f"{NAME}.reserve"
        self._lock = threading.Lock()
        self._data = read_file(OsDisk(), self._path)  # what the file holds, None: there is none yet
        found = None if self._data is None else _decoded(self._path, self._data)
        self.record = NodeRecord(node=node) if found is None else found
        self._is_written = True
        self._is_owed = False  # something should be on the disk, and the disk did not take it
        if self.record.node != node:
            raise RaftmetaError("integrity", f"{self._path} belongs to node {self.record.node!r}, this is {node!r}")

    def deployment(self, name: str) -> DeploymentRecord | None:
        return self.record.deployments.get(name)

    def _known(self, name: str) -> DeploymentRecord:
        """Raises RaftmetaError unknown_deployment for one that was dropped: whoever works on it may not have heard so."""
        found = self.record.deployments.get(name)
        if found is None:
            raise RaftmetaError("unknown_deployment", f"deployment {name!r} left this node")
        return found

    def put(self, deployment: DeploymentRecord) -> None:
        """Durable when this returns. Writes nothing when nothing changed."""
        with self._lock:
            if self.record.deployments.get(deployment.name) != deployment or not self._is_written:
                self._replace(self.record.deployments | {deployment.name: deployment})

    def update(self, name: str, make: Callable[[DeploymentRecord], DeploymentRecord]) -> None:
        """What `make` makes of the record as it is now; nothing comes in between. Durable when this returns."""
        with self._lock:
            before = self._known(name)
            after = make(before)
            if after != before or not self._is_written:
                self._replace(self.record.deployments | {name: after})

    def note(self, name: str, make: Callable[[DeploymentRecord], DeploymentRecord]) -> None:
        """The same, durable only with the next change that is: for what a start may find a little behind."""
        with self._lock:
            changed = self.record.deployments | {name: make(self._known(name))}
            self._is_written = self._is_written and changed == self.record.deployments
            self.record = msgspec.structs.replace(self.record, deployments=changed)

    def keep(self, name: str, make: Callable[[DeploymentRecord], DeploymentRecord]) -> None:
        """The same as `update` while the disk takes it. In force at once otherwise, logged, and written as soon as the disk does: for what
        stops nothing that can be done without a disk."""
        with self._lock:
            before = self.record
            changed = before.deployments | {name: make(self._known(name))}
            if changed == before.deployments:
                return
            try:
                self._replace(changed)
            except RaftmetaError as cause:
                log.error("node_record_not_written", deployment=name, reason=str(cause))
                self.record = msgspec.structs.replace(before, deployments=changed)
                self._is_written, self._is_owed = False, True

    def mend(self) -> None:
        """Write the file again when it is not what was written last, or when something could not be written. Logs what it cannot do."""
        with self._lock:
            why = "it could not be written before" if self._is_owed else self._fault()
            if why:
                try:
                    self._write(self.record)
                    log.warning("node_record_written_again", reason=why)
                except RaftmetaError as cause:
                    log.error("node_record_not_written", reason=f"{why}; {cause}")

    def _set_aside(self) -> None:
        """Room on the disk for a next record, where there is any."""
        if self._reserve.exists():
            return
        with suppress(OSError), open(self._reserve, "wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
            except OSError:
                self._reserve.unlink(missing_ok=True)

    def _fault(self) -> str:
        try:
            data = read_file(OsDisk(), self._path)
        except RaftmetaError as cause:
            return str(cause)
        return "" if data == self._data else f"{self._path} is gone" if data is None else f"{self._path} was written by another process"

    def drop(self, name: str) -> None:
        with self._lock:
            self._replace({key: value for key, value in self.record.deployments.items() if key != name})

    def cordon(self, reason: str) -> None:
        """Durable when this returns; "" lifts it."""
        with self._lock:
            if self.record.cordoned != reason or not self._is_written:
                self._write(msgspec.structs.replace(self.record, cordoned=reason))

    def join(self, cluster_id: str) -> None:
        """From now on this node listens to this cluster and no other."""
        with self._lock:
            self._write(msgspec.structs.replace(self.record, cluster_id=cluster_id))

    def _replace(self, deployments: dict[str, DeploymentRecord]) -> None:
        self._write(msgspec.structs.replace(self.record, deployments=deployments))

    def _write(self, record: NodeRecord) -> None:
        data = msgspec.msgpack.encode(record)
        try:
            write_file(OsDisk(), self._path, data)
        except DiskFull:  # what was set aside is for this: a node that may not answer any more has to know, also after a start
            if not self._reserve.exists():
                raise
            self._reserve.unlink(missing_ok=True)
            write_file(OsDisk(), self._path, data)
        self._set_aside()
        self.record, self._data, self._is_written, self._is_owed = record, data, True, False


def read(directory: Path) -> NodeRecord | None:
    """The record on the disk, None before the first. Raises RaftmetaError `integrity` for anything else."""
    data = read_file(OsDisk(), directory / NAME)
    return None if data is None else _decoded(directory / NAME, data)


def _decoded(path: Path, data: bytes) -> NodeRecord:
    try:
        record = msgspec.msgpack.decode(data, type=NodeRecord)
    except msgspec.MsgspecError as cause:
        raise RaftmetaError("integrity", f"{path} is no node record of this build: {cause}") from cause
    if record.format != FORMAT:
        raise RaftmetaError("integrity", f"{path} has format {record.format!r}, expected {FORMAT!r}")
    return record


class Follower:
    """The node's record as it is on the disk, read again when it was replaced.

    A file that does not check, or is gone, ends nothing that runs: what was read last counts until control has written it again. Only who
    has read none raises RaftmetaError.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self._directory = directory
        self._stamp: tuple[int, int] | None = None
        self._found: NodeRecord | None = None

    def deployments(self) -> Mapping[str, DeploymentRecord]:
        found = self.record()
        return {} if found is None else found.deployments

    def record(self) -> NodeRecord | None:
        with suppress(FileNotFoundError):
            status = self._path.stat()
            stamp = (status.st_ino, status.st_mtime_ns)
            if stamp != self._stamp:
                self._read(stamp)
        return self._found

    def _read(self, stamp: tuple[int, int]) -> None:
        try:
            self._found = read(self._directory) or self._found
        except RaftmetaError as cause:
            if self._found is None:
                raise
            log.error("node_record_unreadable", reason=str(cause), note="what was read before counts until control has written it again")
        self._stamp = stamp
