"""Bearer tokens and the one authorizer.

Members keep the SHA-256 of each token, never the token: 32 random bytes need no slow hash. A token is looked up by its digest, so the time
of a comparison tells nothing about a token. The file of principals is read again when it changes; one that cannot be read leaves the
former principals in force and says so, for an empty table would lock everybody out.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from raftmeta.core.commands import Body
from raftmeta.core.errors import RaftmetaError
from raftmeta.security.roles import AGENT_PREFIX, SYSTEM_PREFIX, Principal, Role, command_permitted, node_of_resource, permitted, takes

TOKEN_BYTES = 32
MAX_FILE_BYTES = 1 << 20
MAX_PRINCIPALS = 4_096
MAX_NAME = 256
MAX_TOKEN_BYTES = 4_096  # in an authorization header
PREFIX = 16  # hex characters of a digest by which candidates are found
REFRESH_S = 1.0  # the file is looked at this often at most

ANONYMOUS = Principal("anonymous", Role.ADMIN)  # the only caller of a member without principals

_TOKEN_ROLES = frozenset(Role) - {Role.SYSTEM}
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")

_log = structlog.get_logger("raftmeta.security")


def new_token() -> str:
    """43 characters of base64url."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def bearer_token(header: bytes) -> str:
    """The token of an authorization header. Raises RaftmetaError unauthenticated."""
    scheme, _, token = header.partition(b" ")
    if scheme.lower() != b"bearer" or not token.strip() or len(token) > MAX_TOKEN_BYTES or not token.isascii():
        raise RaftmetaError("unauthenticated", "the authorization header is no `Bearer TOKEN`")
    return token.strip().decode("ascii")


class Principals:
    """An immutable table: by digest of the token and by name."""

    def __init__(self, entries: Iterable[tuple[Principal, str]]) -> None:
        """Pairs of principal and the hex SHA-256 of its token; a principal may have several tokens, e.g. while one is replaced."""
        self._by_prefix: dict[str, list[tuple[str, Principal]]] = {}
        self._by_name: dict[str, Principal] = {}
        for principal, digest in entries:
            self._by_prefix.setdefault(digest[:PREFIX], []).append((digest, principal))
            self._by_name[principal.name] = principal

    def of_token(self, token: str) -> Principal | None:
        """The holder. The prefix of a digest finds candidates, the comparison of the rest takes the same time for all of them."""
        digest = token_digest(token)
        found = None
        for stored, principal in self._by_prefix.get(digest[:PREFIX], ()):
            if hmac.compare_digest(stored, digest):
                found = principal
        return found

    def of_name(self, name: str) -> Principal | None:
        return self._by_name.get(name)

    def __len__(self) -> int:
        return len(self._by_name)


def load_principals(path: Path) -> Principals:
    """The table of a principals.toml. Raises RaftmetaError `bad_field` that lists every fault."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        values = tomllib.loads(data.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # the last: brackets in brackets, a thousand deep
        raise RaftmetaError("bad_field", f"principals file {path} cannot be read: {error}") from error
    rows = values.get("principal")
    if len(data) > MAX_FILE_BYTES or set(values) != {"principal"} or not isinstance(rows, list) or not 1 <= len(rows) <= MAX_PRINCIPALS:
        limits = f"1 to {MAX_PRINCIPALS} [[principal]] tables and nothing else, at most {MAX_FILE_BYTES} bytes"
        raise RaftmetaError("bad_field", f"principals file {path}: expected {limits}")
    faults: list[str] = []
    entries: list[tuple[Principal, str]] = []
    roles: dict[str, Role] = {}
    for number, row in enumerate(rows, 1):
        fault = _fault_of(row)
        if not fault and roles.setdefault(row["name"], Role(row["role"])) != row["role"]:
            fault = f"{row['name']!r} has two roles"
        if fault:
            faults.append(f"principal {number}: {fault}")
        else:
            entries.append((Principal(row["name"], Role(row["role"])), row["token_sha256"]))
    digests = [digest for _, digest in entries]
    if len(set(digests)) != len(digests):
        faults.append("two principals share a token")
    if faults:
        raise RaftmetaError("bad_field", f"principals file {path}: " + "; ".join(faults))
    return Principals(entries)


def _fault_of(row: object) -> str:
    """What is wrong with one table of the file, "" when nothing is."""
    if not isinstance(row, dict) or set(row) != {"name", "role", "token_sha256"} or not all(isinstance(v, str) for v in row.values()):
        return "expected the strings name, role and token_sha256"
    name, role, digest = row["name"], row["role"], row["token_sha256"]
    if not 1 <= len(name) <= MAX_NAME or not name.isascii() or not name.isprintable() or " " in name:
        return f"name {name[:80]!r} is not 1 to {MAX_NAME} visible ASCII characters"
    if role not in _TOKEN_ROLES:
        return f"role {role[:80]!r} is none of {', '.join(sorted(_TOKEN_ROLES))}"
    if name.startswith(SYSTEM_PREFIX) or name == ANONYMOUS.name:
        return f"name {name!r} is reserved"
    if (role == Role.AGENT) != (name.startswith(AGENT_PREFIX) and name != AGENT_PREFIX):
        return f"role agent belongs to names {AGENT_PREFIX}NODE and to no others, found {name[:80]!r} with role {role}"
    if not _DIGEST.match(digest):
        return "token_sha256 is not 64 lower-case hex characters"
    return ""


class Authorizer:
    """The only place that judges. May be used from several threads: it replaces an immutable table."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Without a path everybody is `anonymous` and may do everything; the configuration allows that on loopback only."""
        self._path = path
        self._clock = clock
        self._stamp = _stamp(path)
        self._principals = load_principals(path) if path is not None else None
        self._next_look = clock() + REFRESH_S

    def authenticate(self, token: str) -> Principal:
        """The principal of a bearer token; the empty token is that of a caller without one. Raises RaftmetaError unauthenticated."""
        self._refresh()
        if self._principals is None:
            if token:
                raise RaftmetaError("unauthenticated", "this member knows no tokens; leave the token out")
            return ANONYMOUS
        if not token:
            raise RaftmetaError("unauthenticated", "expected a bearer token, found none")
        principal = self._principals.of_token(token)
        if principal is None:
            raise RaftmetaError("unauthenticated", "the bearer token is unknown")
        return principal

    def require(self, caller: Principal, action: str, resource: str) -> None:
        """Raises RaftmetaError forbidden. `resource` is the path below the API's version, e.g. `nodes/n1/heartbeat`."""
        if caller == ANONYMOUS and self._principals is None:
            return
        if not permitted(caller, action, node_of_resource(resource)):
            detail = f"{caller.name} with role {caller.role} may not {action} {resource[:200]}; {takes(action)}"
            raise RaftmetaError("forbidden", detail)

    def permits(self, name: str, body: Body) -> bool:
        """The leader's question: may the principal of this name have this command applied?"""
        self._refresh()
        if name.startswith(SYSTEM_PREFIX):
            return command_permitted(Principal(name, Role.SYSTEM), body)
        if self._principals is None:
            return name == ANONYMOUS.name
        principal = self._principals.of_name(name)
        return principal is not None and command_permitted(principal, body)

    def _refresh(self) -> None:
        now = self._clock()
        if self._path is None or now < self._next_look:
            return
        self._next_look = now + REFRESH_S
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._principals = load_principals(self._path)
        except RaftmetaError as error:
            _log.error("principals_reload_failed", detail=error.detail)
            return
        except Exception as fault:  # noqa: BLE001 - asked on the log's thread, which a file must not end, whatever it holds
            _log.error("principals_reload_failed", detail=f"{type(fault).__name__}: {fault}")
            return
        _log.info("principals_reloaded", path=str(self._path), principals=len(self._principals))


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    if path is None:
        return None
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
