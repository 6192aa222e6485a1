"""How the processes of one agent find each other's files. Pure.

Arena files of several agents share one memory file system, so a name carries the node, the deployment and a digest that tells apart two
agents of the same node name. Names stay below the 255 bytes of a file name whatever the names they are made of.
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def arena(store_dir: Path, node: str, deployment: str) -> str:
    """File name in the arena directory; the control block's has another ending."""
    identity = "\0".join((str(store_dir.absolute()), node, deployment))
    return f"raftmeta-{node[:40]}-{deployment[:40]}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.arena"


def control_block(arena_name: str) -> str:
    return arena_name.removesuffix(".arena") + ".control"


def worker_socket(run_dir: Path, index: int) -> Path:
    return run_dir / f"worker-{index}.sock"


def prober_socket(run_dir: Path) -> Path:
    return run_dir / "prober.sock"


def control_socket(run_dir: Path) -> Path:
    return run_dir / "control.sock"


def front_socket(run_dir: Path) -> Path:
    return run_dir / "front.sock"


def address_file(run_dir: Path) -> Path:
    """Where a started agent writes the address its serving API listens on."""
    return run_dir / "address"
