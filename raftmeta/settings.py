"""How a process gets its settings: one TOML file, the environment over it, checked as a whole with every fault told at once.

Relative paths in the file start at its folder, so that it can be moved with what it names. What may be set and what is sound stands in the
types of each process (`raftmeta.config`, `node_agent.config`); nothing here knows a field. The only reader of the environment for them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from raftmeta.config_files import require_own
from raftmeta.core.errors import RaftmetaError

MAX_FILE_BYTES = 1 << 20

SettingsT = TypeVar("SettingsT", bound="Settings")


class Settings(BaseSettings):
    """Base of a process's settings. A variable that is set to nothing counts as not given."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_ignore_empty=True)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return env_settings, init_settings  # the file comes in as init values


def load(shape: type[SettingsT], path: Path, own_paths: Iterable[tuple[str, ...]]) -> SettingsT:
    """The checked settings of a file; `own_paths` name its fields that start at its folder, table by table.

    Raises RaftmetaError `bad_field` that lists every fault.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
        values: dict[str, Any] = tomllib.loads(data.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as cause:  # the last: brackets in brackets, a thousand deep
        raise RaftmetaError("bad_field", f"{path} is no readable TOML file: {cause}") from cause
    require_own(path, values, shape.model_fields)
    folder = path.absolute().parent
    for names in own_paths:
        _anchor(values, names, folder)
    return checked(shape, values, str(path))


def checked(shape: type[SettingsT], values: dict[str, Any], where: str) -> SettingsT:
    """These values under the environment's. Raises RaftmetaError `bad_field` that lists every fault."""
    try:
        return shape(**values)
    except ValidationError as cause:
        raise RaftmetaError("bad_field", f"{where}: " + "; ".join(_faults(cause))) from cause
    except SettingsError as cause:
        raise RaftmetaError("bad_field", f"environment: {cause}") from cause


def _anchor(values: dict[str, Any], names: tuple[str, ...], folder: Path) -> None:
    table: Any = values
    for name in names[:-1]:
        table = table.get(name) if isinstance(table, dict) else None
    if isinstance(table, dict) and isinstance(table.get(names[-1]), str):
        table[names[-1]] = str(folder / table[names[-1]])


def _faults(error: ValidationError) -> list[str]:
    found = []
    for fault in error.errors(include_url=False, include_context=False):
        where = ".".join(str(part) for part in fault["loc"])
        message = fault["msg"].removeprefix("Value error, ")
        found.append(f"{where}: {message}" if where else message)
    return sorted(found)
