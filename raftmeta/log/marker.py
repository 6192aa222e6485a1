"""The one-time marker of a member's first start: which cluster it belongs to, and who forms it.

`init` writes it into each initial member's data directory; the first commit uses it up. A data directory without a marker and without a
log belongs to no cluster and waits to be told, so an emptied disk never forms a cluster of its own.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from raftmeta.core.errors import RaftmetaError
from raftmeta.durable import Disk, read_file, write_file
from raftmeta.log.configuration import Configuration

MARKER_NAME = "bootstrap"


class Marker(msgspec.Struct, frozen=True):
    cluster_id: str
    configuration: Configuration


def write_marker(disk: Disk, data_dir: Path, marker: Marker) -> None:
    disk.make_directory(data_dir)
    write_file(disk, data_dir / MARKER_NAME, _encoder.encode(marker))


def read_marker(disk: Disk, data_dir: Path) -> Marker | None:
    """None when there is none, or it was used up. Raises RaftmetaError integrity when it cannot be read."""
    data = read_file(disk, data_dir / MARKER_NAME)
    if data is None:
        return None
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise RaftmetaError("integrity", f"{data_dir / MARKER_NAME}: expected a bootstrap marker, found {error}") from error


def consume_marker(disk: Disk, data_dir: Path) -> None:
    """Call once the first entry is committed; twice is fine."""
    disk.unlink(data_dir / MARKER_NAME)
    disk.sync_directory(data_dir)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Marker)
