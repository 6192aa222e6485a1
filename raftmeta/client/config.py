"""Where the members are and who is asking: from options, the environment or a client.toml, in this order.

The file is what `raftmeta init` writes; relative paths in it start at its folder. All faults are reported at once. This is the only file of
the client that reads the environment. A token is taken from a file, never from the command line, where every user of the machine sees it.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from raftmeta.config_files import require_own
from raftmeta.core.errors import RaftmetaError

DEFAULT_URL = "http://127.0.0.1:7400"  # the development member of `raftmeta server`
MAX_FILE_BYTES = 64 << 10
MAX_URLS = 64

_FIELDS = ("urls", "ca_file", "token_file", "timeout_s")


class Connection(NamedTuple):
    urls: tuple[str, ...] = (DEFAULT_URL,)
    ca_file: Path | None = None  # PEM of the authority that signed the members' certificates
    token_file: Path | None = None
    timeout_s: float = 10.0  # one call, retries included; longer than two elections

    def token(self) -> str | None:
        """The bearer token, None when no file is configured. Raises RaftmetaError `bad_field`."""
        if self.token_file is None:
            return None
        token = _read(self.token_file, "token_file").strip()
        if not token or not token.isascii() or any(char.isspace() for char in token):
            raise RaftmetaError("bad_field", f"token_file {self.token_file} does not hold one line of visible ASCII")
        return token


def resolve(urls: Sequence[str] = (), config: Path | None = None, environ: Mapping[str, str] | None = None) -> Connection:
    """The connection to use. Options win over the environment, the environment over the file, the file over the default."""
    env = os.environ if environ is None else environ
    if config is None and env.get("RAFTMETA_CLIENT_CONFIG"):
        config = Path(env["RAFTMETA_CLIENT_CONFIG"])
    connection = load(config) if config is not None else Connection()
    from_env = tuple(part.strip() for part in env.get("RAFTMETA_URL", "").split(",") if part.strip())
    chosen = tuple(urls) or from_env
    if chosen:
        connection = connection._replace(urls=chosen)
    if env.get("RAFTMETA_TOKEN_FILE"):
        connection = connection._replace(token_file=Path(env["RAFTMETA_TOKEN_FILE"]))
    return connection


def load(path: Path) -> Connection:
    """The connection of a client.toml. Raises RaftmetaError `bad_field` that lists every fault."""
    try:
        values = tomllib.loads(_read(path, "client configuration"))
    except (tomllib.TOMLDecodeError, RecursionError) as cause:
        raise RaftmetaError("bad_field", f"{path} is no TOML: {cause}") from cause
    require_own(path, values, _FIELDS)
    faults = [f"{name!r} is no setting (known: {', '.join(_FIELDS)})" for name in values if name not in _FIELDS]
    urls = values.get("urls", [DEFAULT_URL])
    if not isinstance(urls, list) or not 1 <= len(urls) <= MAX_URLS or not all(isinstance(url, str) for url in urls):
        faults.append(f"urls is {urls!r}, expected a list of 1 to {MAX_URLS} URLs")
    timeout_s = values.get("timeout_s", 10.0)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0.1 <= timeout_s <= 3600:
        faults.append(f"timeout_s is {timeout_s!r}, expected seconds from 0.1 to 3600")
    for name in ("ca_file", "token_file"):
        if name in values and (not isinstance(values[name], str) or not values[name]):
            faults.append(f"{name} is {values[name]!r}, expected a path")
    if faults:
        raise RaftmetaError("bad_field", f"{path}: " + "; ".join(faults))
    folder = path.absolute().parent
    return Connection(
        urls=tuple(urls),
        ca_file=folder / values["ca_file"] if "ca_file" in values else None,
        token_file=folder / values["token_file"] if "token_file" in values else None,
        timeout_s=float(timeout_s),
    )


def runtime_dir(environ: Mapping[str, str] | None = None, user: int | None = None) -> Path:
    """Where commands of this user meet until the machine restarts: the same from a shell and from cron, which sets no variable."""
    env = os.environ if environ is None else environ
    number = os.getuid() if user is None else user
    session = Path(f"/run/user/{number}")
    if env.get("XDG_RUNTIME_DIR"):
        return Path(env["XDG_RUNTIME_DIR"]) / "raftmeta"
    return session / "raftmeta" if session.is_dir() else Path(f"/tmp/raftmeta-{number}")


def _read(path: Path, what: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as cause:
        raise RaftmetaError("bad_field", f"{what} {path} cannot be read: {cause.strerror}", unread=what) from cause
    if len(data) > MAX_FILE_BYTES:
        raise RaftmetaError("bad_field", f"{what} {path} has more than {MAX_FILE_BYTES} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise RaftmetaError("bad_field", f"{what} {path} is not UTF-8") from cause
