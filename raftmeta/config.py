"""The settings of a member: one TOML file, typed, overridden by RAFTMETA_* variables, every fault reported at once.

`RAFTMETA_DATA_DIR` overrides `data_dir`, `RAFTMETA_API__LISTEN` overrides `listen` of `[api]`. What would let strangers in (no TLS, no
principals) is accepted on loopback only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import SettingsConfigDict

from raftmeta import settings
from raftmeta.addresses import is_loopback, split_address
from raftmeta.core.manifest import NAME

MAX_MEMBERS = 9  # a majority of more is slower without being safer
DEVELOPMENT_ID = "dev"
DEFAULT_API_LISTEN = "127.0.0.1:7400"

_PATHS = (
    ("data_dir",),
    ("principals_file",),
    ("api", "certificate"),
    ("api", "key"),
    ("peer", "certificate"),
    ("peer", "key"),
    ("peer", "authority"),
)


def _name(value: str) -> str:
    if not NAME.match(value):
        raise ValueError(f"{value[:130]!r} is outside [a-z0-9][a-z0-9._-]{{0,127}}")
    return value


def _address(value: str) -> str:
    split_address(value)
    return value


def _url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{value[:200]!r} is no http or https URL")
    return value.rstrip("/")


Name = Annotated[str, AfterValidator(_name)]
Address = Annotated[str, AfterValidator(_address)]
Url = Annotated[str, AfterValidator(_url)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ApiConfig(_Table):
    listen: Address = Field(default=DEFAULT_API_LISTEN, description="host:port of the HTTP API; port 0 takes a free one")
    url: Url | Literal[""] = Field(default="", description="how clients and other members reach the API; empty: made of listen")
    certificate: Path | None = Field(default=None, description="PEM chain of the API; none: plain HTTP, loopback only")
    key: Path | None = Field(default=None, description="PEM private key of the API's certificate")

    @property
    def public_url(self) -> str:
        return self.url or f"{'https' if self.certificate else 'http'}://{self.listen}"


class PeerConfig(_Table):
    listen: Address = Field(description="host:port of the link between members; only members connect here")
    advertise: Address | Literal[""] = Field(default="", description="host:port at which the other members reach it; empty: listen")
    certificate: Path | None = Field(default=None, description="PEM certificate that names this member; server and client end of a link")
    key: Path | None = Field(default=None, description="PEM private key of that certificate")
    authority: Path | None = Field(default=None, description="PEM of the cluster's own authority; nobody else's certificates are taken")
    plain: bool = Field(default=False, description="no TLS and no proof of identity between members; for measurements, loopback only")

    @property
    def public_address(self) -> str:
        return self.advertise or self.listen


class InitialMember(_Table):
    id: Name = Field(description="member id, as in its certificate")
    zone: Name = Field(description="failure domain of the member")
    peer_address: Address = Field(description="host:port of its link to the others")
    api_url: Url = Field(description="URL of its API")


class Timings(_Table):
    heartbeat_s: float = Field(default=0.1, ge=0.01, le=10, description="seconds between the leader's signs of life")
    election_min_s: float = Field(
        default=1.0, ge=0.1, le=60, description="seconds of silence after which a follower may stand; ten heartbeats"
    )
    election_max_s: float = Field(default=1.5, ge=0.1, le=120, description="its upper end; the spread keeps two from standing at once")
    link_idle_s: float = Field(
        default=1.5, ge=0.1, le=120, description="seconds of silence that end a link between members; about one election"
    )
    handshake_s: float = Field(
        default=5.0, ge=0.5, le=60, description="seconds from accept to a valid hello; bounds what a stranger can hold"
    )


class Limits(_Table):
    peer_queue_bytes: int = Field(default=32 << 20, ge=17 << 20, le=1 << 30, description="bytes waiting for one member; two of the largest")
    pending_connections: int = Field(
        default=64, ge=4, le=4096, description="peer connections without a valid hello; each holds at most 80 KiB"
    )
    body_bytes: int = Field(default=4 << 20, ge=64 << 10, le=64 << 20, description="bytes of one API request; a command is at most 4 MiB")
    requests: int = Field(default=2048, ge=16, le=100_000, description="API requests in flight; one more is answered 429")
    watchers: int = Field(default=1024, ge=1, le=100_000, description="open watches; one more is answered 429")
    event_count: int = Field(
        default=100_000, ge=1000, le=10_000_000, description="events kept for watches that resume; older ones are compacted"
    )
    event_bytes: int = Field(default=64 << 20, ge=1 << 20, le=4 << 30, description="bytes of those events; whichever bound is met first")
    segment_bytes: int = Field(default=64 << 20, ge=16 << 20, le=1 << 30, description="bytes of one journal segment; at least two entries")
    snapshot_journal_bytes: int = Field(
        default=256 << 20, ge=32 << 20, le=1 << 40, description="journal bytes after which a snapshot is taken at the latest"
    )


class ServerConfig(settings.Settings):
    """Sizes are bytes, times are seconds."""

    model_config = SettingsConfigDict(env_prefix="RAFTMETA_", env_nested_delimiter="__", validate_default=True)

    member_id: Name = Field(description="name of this member in the cluster; never given to another machine")
    zone: Name = Field(description="failure domain; members of one zone may be lost together")
    cluster_id: Name | Literal[""] = Field(default="", description="as in the certificates; empty: a single member makes one for itself")
    data_dir: Path = Field(description="journal, snapshots, hard state; belongs to one process at a time")
    principals_file: Path | None = Field(
        default=None, description="TOML of token digests and roles; none: everybody is admin, loopback only"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least severity that is logged")
    api: ApiConfig = Field(default=ApiConfig(), description="the HTTP API")
    peer: PeerConfig | None = Field(default=None, description="the link to the other members; none: a single member")
    members: tuple[InitialMember, ...] = Field(
        default=(), max_length=MAX_MEMBERS, description="the members at the first start; afterwards the replicated membership counts"
    )
    timings: Timings = Field(default=Timings(), description="clocks of the replicated log")
    limits: Limits = Field(default=Limits(), description="bounds of queues and files")

    @classmethod
    def development(cls, data_dir: Path) -> ServerConfig:
        """One member on loopback, no TLS, no tokens. Environment overrides apply and are checked like everything else."""
        values = {"member_id": DEVELOPMENT_ID, "zone": DEVELOPMENT_ID, "data_dir": data_dir}
        return settings.checked(cls, values, "development member")

    @model_validator(mode="after")
    def _is_consistent(self) -> ServerConfig:
        faults = [*_api_faults(self), *_peer_faults(self), *_member_faults(self), *_timing_faults(self.timings)]
        if faults:
            raise ValueError("; ".join(faults))
        return self


def load(path: Path) -> ServerConfig:
    """The checked settings of a file. Raises RaftmetaError `bad_field` that lists every fault."""
    return settings.load(ServerConfig, path, _PATHS)


def _api_faults(config: ServerConfig) -> list[str]:
    api, faults = config.api, []
    if (api.certificate is None) != (api.key is None):
        faults.append("api.certificate and api.key belong together")
    if not is_loopback(split_address(api.listen)[0]):
        if api.certificate is None:
            faults.append(f"api.listen {api.listen} is not loopback, so api.certificate and api.key are needed")
        if config.principals_file is None:
            faults.append(f"api.listen {api.listen} is not loopback, so principals_file is needed")
    if api.url and api.url.startswith("https:") != (api.certificate is not None):
        faults.append(f"api.url is {api.url}, expected {'https' if api.certificate else 'http'}")
    return faults


def _peer_faults(config: ServerConfig) -> list[str]:
    peer, faults = config.peer, []
    if peer is None:
        return ["members are given, so [peer] is needed"] if len(config.members) > 1 else []
    given = [path is not None for path in (peer.certificate, peer.key, peer.authority)]
    if peer.plain and any(given):
        faults.append("peer.plain and TLS files exclude each other")
    if not peer.plain and not all(given):
        faults.append("peer.certificate, peer.key and peer.authority are needed")
    if peer.plain and not all(is_loopback(split_address(address)[0]) for address in (peer.listen, peer.public_address)):
        faults.append(f"peer.plain is for loopback only, found {peer.listen} and {peer.public_address}")
    if not config.cluster_id:
        faults.append("[peer] needs cluster_id")
    return faults


def _member_faults(config: ServerConfig) -> list[str]:
    ids = [member.id for member in config.members]
    faults = []
    if len(set(ids)) != len(ids):
        faults.append(f"members repeat an id: {', '.join(ids)}")
    if ids and config.member_id not in ids:
        faults.append(f"member_id {config.member_id!r} is not among the members {', '.join(ids)}")
    return faults


def _timing_faults(timings: Timings) -> list[str]:
    faults = []
    if timings.election_max_s <= timings.election_min_s:
        faults.append(f"timings.election_max_s {timings.election_max_s} must exceed election_min_s {timings.election_min_s}")
    if timings.election_min_s < 3 * timings.heartbeat_s:
        faults.append(f"timings.election_min_s {timings.election_min_s} must be at least 3 times heartbeat_s {timings.heartbeat_s}")
    if timings.link_idle_s < 3 * timings.heartbeat_s:
        faults.append(f"timings.link_idle_s {timings.link_idle_s} must be at least 3 times heartbeat_s {timings.heartbeat_s}")
    return faults
