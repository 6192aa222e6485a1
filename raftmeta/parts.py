"""What a data directory yields when it is opened: identity, journal, snapshots, the recovered state, a network to start with.

Everything is verified here, before any port is bound, and nothing runs yet. A directory that belongs to another member or another
cluster is refused. A new directory forms a cluster only by the marker that `init` wrote, or as the single development member.
"""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from raftmeta.config import ServerConfig
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.state import SUPPORTED_FEATURE_LEVEL
from raftmeta.durable import LOCK_NAME, Disk, read_file, write_file
from raftmeta.log import marker as markers
from raftmeta.log import recovery
from raftmeta.log.boot import Recovered, StateLoader, recover
from raftmeta.log.clock import check_clock
from raftmeta.log.configuration import MemberSpec, configuration_of
from raftmeta.log.hard_state import Owner
from raftmeta.log.journal import Journal, Tuning
from raftmeta.log.library import check_library
from raftmeta.log.marker import Marker
from raftmeta.log.opening import Openers, Whose, open_log
from raftmeta.log.quarantine import KEPT_NAME, MARK_NAME
from raftmeta.log.runner import Identity, Network
from raftmeta.log.settings import TransportSettings
from raftmeta.log.snapshots import SnapshotStore
from raftmeta.log.solo import SoloNetwork
from raftmeta.log.transport import TlsTransport
from raftmeta.log.wall import library_clock
from raftmeta.security.tls import PeerTls, TlsFiles

IDENTITY_NAME = "identity"
OWN_NAMES = frozenset(  # of a directory before its first start
    {LOCK_NAME, markers.MARKER_NAME, IDENTITY_NAME, MARK_NAME, KEPT_NAME, "lost+found"}
)


class Stored(msgspec.Struct, frozen=True):
    """The file of the identity."""

    member_id: str
    cluster_id: str
    began: bool = False  # the journal exists: from then on a missing one is a loss, and no first start


class Parts(msgspec.Struct, frozen=True):
    disk: Disk
    data_dir: Path
    identity: Identity
    configured: tuple[MemberSpec, ...]  # addresses to start with; who is a member stands in the log
    journal: Journal
    store: SnapshotStore
    recovered: Recovered
    network: Network
    snapshot_worker: ThreadPoolExecutor
    segment_worker: ThreadPoolExecutor


def open_parts(config: ServerConfig, disk: Disk) -> Parts:
    """The caller holds the directory's lock. Raises RaftmetaError naming what is wrong and what to do."""
    check_library()
    check_clock(library_clock)
    marker = markers.read_marker(disk, config.data_dir)
    stored = _stored(config, disk, marker)
    identity, has_peer_port = Identity(stored.member_id, stored.cluster_id), config.peer is not None
    if marker is None and not stored.began and not has_peer_port:
        marker = _development_marker(config, disk, identity)
    segment_worker = ThreadPoolExecutor(1, "raftmeta-segments")
    store = SnapshotStore(disk, config.data_dir / "snapshots", identity.cluster_id)
    snapshots = StateLoader(store)
    owner = Owner(identity.cluster_id, identity.member_id)
    tuning = Tuning(owner=owner, joining=has_peer_port, worker=segment_worker, accept=snapshots.check)

    def recover_from(journal: Journal) -> Recovered:
        first = markers.read_marker(disk, config.data_dir)
        return recover(journal, snapshots, first.configuration if first else None)

    openers = Openers(
        lambda: Journal.open(disk, config.data_dir / "journal", segment_bytes=config.limits.segment_bytes, tuning=tuning), recover_from
    )
    journal, recovered = open_log(disk, config.data_dir, openers, Whose(owner, not _is_alone(config), stored.began))
    configured = tuple(MemberSpec(m.id, m.zone, m.peer_address, m.api_url) for m in config.members)
    try:
        if not stored.began:
            _store(disk, config.data_dir, msgspec.structs.replace(stored, began=True))
        network = _network(config, identity)
    except BaseException:
        journal.close()
        raise
    workers = ThreadPoolExecutor(1, "raftmeta-snapshots"), segment_worker
    return Parts(disk, config.data_dir, identity, configured, journal, store, recovered, network, *workers)


def accept_loss(config: ServerConfig, disk: Disk, index: int) -> tuple[int, int]:
    """`raftmeta server --accept-data-loss-from INDEX`: give up the damaged records; the range that is lost.

    Only of a member alone: one of several would vote on less than it acknowledged, and takes what is damaged from the others.
    """
    if not _is_alone(config):
        raise RaftmetaError(
            "bad_field",
            f"--accept-data-loss-from is for a single member and {config.member_id} is one of several: start it without the option, it "
            "sets its damaged files aside and takes everything from the others; nothing was changed",
        )
    stored = _stored(config, disk, markers.read_marker(disk, config.data_dir))
    owner = Owner(stored.cluster_id, stored.member_id)
    return recovery.accept_loss(disk, config.data_dir / "journal", index, owner=owner, segment_bytes=config.limits.segment_bytes)


def _is_alone(config: ServerConfig) -> bool:
    """Whether nobody else can hold what this member holds: it has no peer port, or was set up as the only member."""
    return config.peer is None or [member.id for member in config.members] == [config.member_id]


def _stored(config: ServerConfig, disk: Disk, marker: Marker | None) -> Stored:
    """Who this directory belongs to, written at its first start. Raises RaftmetaError when that is somebody else."""
    path = config.data_dir / IDENTITY_NAME
    data = read_file(disk, path)
    wanted = config.cluster_id or (marker.cluster_id if marker else "")
    if data is None:
        _refuse_foreign(disk, config.data_dir)
        return _store(disk, config.data_dir, Stored(config.member_id, wanted or f"dev-{uuid.uuid4().hex[:12]}"))
    try:
        stored = msgspec.json.decode(data, type=Stored)
    except msgspec.MsgspecError as cause:
        raise RaftmetaError("integrity", f"{path}: the identity cannot be read: {cause}") from cause
    expected = config.member_id, wanted or stored.cluster_id
    if (stored.member_id, stored.cluster_id) != expected:
        raise RaftmetaError(
            "directory_refused",
            f"{config.data_dir} belongs to member {stored.member_id!r} of cluster {stored.cluster_id!r}, "
            f"the configuration names member {expected[0]!r} of cluster {expected[1]!r}",
        )
    return stored


def _store(disk: Disk, data_dir: Path, stored: Stored) -> Stored:
    write_file(disk, data_dir / IDENTITY_NAME, msgspec.json.encode(stored))
    return stored


def _refuse_foreign(disk: Disk, data_dir: Path) -> None:
    """A directory of somebody else's files does not become a member's."""
    foreign = [name for name in disk.listdir(data_dir) if name not in OWN_NAMES]
    if foreign:
        raise RaftmetaError(
            "directory_refused", f"{data_dir} holds {foreign[0][:80]!r} and no member; a member's directory is empty at its first start"
        )


def _development_marker(config: ServerConfig, disk: Disk, identity: Identity) -> Marker:
    """A member without a peer port is alone for good, so it may form its own cluster of one."""
    spec = MemberSpec(config.member_id, config.zone, "", config.api.public_url)
    marker = Marker(identity.cluster_id, configuration_of((spec,)))
    markers.write_marker(disk, config.data_dir, marker)
    return marker


def _network(config: ServerConfig, identity: Identity) -> Network:
    peer, timings, limits = config.peer, config.timings, config.limits
    if peer is None:
        return SoloNetwork()
    tls = None
    if peer.certificate is not None and peer.key is not None and peer.authority is not None:
        tls = PeerTls(TlsFiles(certificate=peer.certificate, key=peer.key, authority=peer.authority))
    settings = TransportSettings(
        cluster_id=identity.cluster_id,
        member_id=config.member_id,
        listen=peer.listen,
        feature=SUPPORTED_FEATURE_LEVEL,
        queue_bytes=limits.peer_queue_bytes,
        pending_connections=limits.pending_connections,
        handshake_s=timings.handshake_s,
        idle_s=timings.link_idle_s,
    )
    return TlsTransport(settings, tls)
