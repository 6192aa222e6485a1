"""The description of a module as it lies in a directory of weights."""

from __future__ import annotations

from pathlib import Path

from raftmeta import strict_json
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.module_description import FILE, MAX_BYTES, MAX_DEPTH, ModuleDescription
from raftmeta.core.module_description import read as read_value


def engine_of(directory: Path) -> str:
    """The engine that a directory is made for, by the file that it cannot do without."""
    return "torch_module" if (directory / FILE).is_file() else "hf"


def read(directory: Path) -> ModuleDescription:
    """Raises OSError, or RaftmetaError bad_manifest for a file that is too large or describes nothing that can be built."""
    with (directory / FILE).open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    try:
        return read_value(strict_json.loads(data, MAX_BYTES, MAX_DEPTH))
    except RaftmetaError as cause:
        raise RaftmetaError("bad_manifest", cause.detail) from cause
