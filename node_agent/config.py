"""The agent's settings: one TOML file, typed, overridden by RAFTMETA_AGENT_* variables, every fault reported at once.

Relative paths of the node's own files start at the file's folder; artifact roots are named in full. Paths are checked for their shape here
and for their existence where they are used.
"""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from node_agent.engine import known
from node_agent.quiet import MIN_WINDOW, Quiet
from raftmeta import settings
from raftmeta.addresses import is_loopback
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import NAME

_HOST = re.compile(r"[A-Za-z0-9.-]{1,253}\Z")
_PATHS = (
    ("ca_file",),
    ("token_file",),
    ("principals_file",),
    ("s3_secret_file",),
    ("tls_cert",),
    ("tls_key",),
    ("store_dir",),
    ("arena_dir",),
    ("run_dir",),
)  # not artifact roots

Seconds = Annotated[float, Field(gt=0, le=3600)]


class S3Settings(NamedTuple):
    endpoint: str = ""  # URL of the service; empty: that of the region
    region: str = "us-east-1"
    access_key_id: str = ""  # empty: what the environment of the process gives
    secret_file: Path | None = None  # one line, read anew for every bucket that is opened
    timeout_s: float = 30.0


class AgentConfig(settings.Settings):
    """Sizes are bytes, times are seconds."""

    model_config = SettingsConfigDict(env_prefix="RAFTMETA_AGENT_")

    node: str  # the name by which deployments list this node
    zone: str  # failure domain, as in the deployments' sides
    member_urls: tuple[str, ...]  # any members of the cluster; the client fails over between them
    ca_file: Path | None = None  # certificate authority of the members' API, PEM
    token_file: Path | None = None  # bearer token of role `agent`, one line; what this node shows to the members
    listen: str = "127.0.0.1:8100"  # host:port of the serving API; port 0 takes a free one and writes it to run_dir/address
    url: str = ""  # how clients and the checker reach this node; empty: made of `listen`
    tls_cert: Path | None = None  # certificate chain of the serving API, PEM; with tls_key; both are read again when they are replaced
    tls_key: Path | None = None
    principals_file: Path | None = None  # who may call the serving API: TOML of token digests and roles, as the members'; none: everybody
    listen_without_tokens: bool = False  # whoever reaches a `listen` that is not loopback may ask everything; instead of principals_file
    health_without_token: bool = True  # /livez, /readyz and /v2/health/*, for probes that have no token
    metrics_without_token: bool = False  # /metrics, for a Prometheus that has none
    store_dir: Path  # blobs, versions and the state of this node; survives reboots
    arena_dir: Path = Path("/dev/shm")  # memory file system that holds the arenas
    run_dir: Path | None = None  # Unix sockets; None: store_dir/run
    artifact_roots: tuple[Path, ...] = ()  # directories that file:// sources may lie in; anything else is refused

    engines: tuple[str, ...] = ()  # hf, torch_module: the libraries that processes load; none: those that are installed
    workers: int = Field(default=1, ge=1, le=64)  # serving processes
    threads: int = Field(default=1, ge=1, le=256)  # computing threads of one worker
    worker_depth: int = Field(default=2, ge=1, le=64)  # requests handed to one worker at a time: one computes, the rest waits beside it
    queue_limit: int = Field(default=256, ge=1, le=100_000)  # requests that wait in the front; one more is answered 503
    request_deadline_s: Seconds = 30.0  # longer than the restart of a worker, so a replayed request still finds one
    body_limit_bytes: int = Field(default=8 << 20, ge=1024, le=1 << 30)
    connection_limit: int = Field(default=1024, ge=1, le=100_000)
    drain_s: float = Field(default=1.0, ge=0, le=600)  # not ready before the listener closes, so that routers move on
    start_wait_s: Seconds = 10.0  # how long a fresh start waits for the control plane before it serves its pinned version
    load_timeout_s: Seconds = 300.0  # one worker binding and warming one version, or the prober trying it
    warm_limit_s: Seconds = 60.0  # of the first forward pass of a version; one that takes longer is refused

    store_quota_bytes: int = Field(default=1 << 40, ge=1 << 20)  # all blobs together
    slot_bytes: int = Field(default=0, ge=0)  # size of one slot; 0: the first version and a quarter more
    stage_threads: int = Field(default=2, ge=1, le=64)  # that fill and check a slot; beside requests they take only idle processors
    stage_bytes_per_s: int = Field(default=0, ge=0)  # moved beside requests, staging and scrub together; 0: a quarter of the memory's speed
    verify_max_age_s: float = Field(default=300.0, ge=0, le=86_400)  # what staging keeps is read again unless its vector is this young
    mend_blocks: int = Field(default=16, ge=0, le=16)  # damaged ones that are written again in place; more, or 0: by the other slot
    scrub_interval_s: float = Field(default=3600.0, ge=0, le=2_592_000)  # in which all that serves is read and compared again; 0: never
    numa_nodes: tuple[Annotated[int, Field(ge=0, le=1023)], ...] = ()  # memory nodes that arenas lie on; none: anywhere
    activation_bytes: int = Field(default=0, ge=0)  # one process beside the arena, at its peak; 0: as the prober saw the last version
    quiet_requests_per_s: float = Field(default=0, ge=0, le=1e6)  # a version becomes ready only below this rate; 0: at any
    quiet_window_requests: int = Field(default=MIN_WINDOW, ge=MIN_WINDOW, le=1_000_000)  # that the rate is measured over
    quiet_wait_s: Seconds = 60.0  # for such a moment; then the rollout fails. Roll-backs wait for nothing
    max_deployments: int = Field(default=8, ge=1, le=64)  # deployments this node takes part in; more are refused
    fetch_attempts: int = Field(default=4, ge=1, le=20)  # per source and byte range without progress
    fetch_timeout_s: Seconds = 30.0  # without a byte from a source
    s3_endpoint: str = Field(default="", pattern="^(https?://[A-Za-z0-9.:\\[\\]_-]+/?)?$")  # of s3:// sources; empty: that of the region
    s3_region: str = Field(default="us-east-1", pattern="^[a-z0-9-]{1,40}$")
    s3_access_key_id: str = Field(default="", max_length=128)  # empty: AWS_* variables, web identity or the machine's role
    s3_secret_file: Path | None = None  # the secret of that key, one line
    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$")

    @field_validator("node", "zone")
    @classmethod
    def _is_name(cls, value: str) -> str:
        if not NAME.match(value):
            raise ValueError(f"{value[:130]!r} is outside [a-z0-9][a-z0-9._-]{{0,127}}")
        return value

    @field_validator("member_urls")
    @classmethod
    def _are_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not 1 <= len(value) <= 16:
            raise ValueError(f"{len(value)} members, expected 1..16")
        for url in value:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{url[:200]!r} is no http or https URL")
        return value

    @field_validator("listen")
    @classmethod
    def _is_address(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if not (port.isascii() and port.isdigit() and int(port) <= 65535):
            raise ValueError(f"{value[:200]!r} is not host:port")
        if not _HOST.match(host):
            ipaddress.IPv6Address(host.strip("[]"))
        return value

    @field_validator("artifact_roots")
    @classmethod
    def _are_absolute(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        for path in value:
            if not path.is_absolute():
                raise ValueError(f"{str(path)!r} is not absolute")
        return value

    @model_validator(mode="after")
    def _is_consistent(self) -> AgentConfig:
        faults = _port_faults(self)
        if engine_fault := known.fault(self.engines):
            faults.append(engine_fault)
        if (self.tls_cert is None) != (self.tls_key is None):
            faults.append("tls_cert and tls_key belong together")
        if bool(self.s3_access_key_id) != (self.s3_secret_file is not None):
            faults.append("s3_access_key_id and s3_secret_file belong together")
        if self.host_port[0] in ("0.0.0.0", "::") and not self.url:
            faults.append(f"listen {self.listen} is every address of the machine; set url to the one that others reach it by")
        if self.quiet is not None and self.quiet.span_s > self.quiet_wait_s:
            faults.append(
                f"quiet_wait_s {self.quiet_wait_s:g} is shorter than quiet_window_requests at quiet_requests_per_s take, "
                f"{self.quiet.span_s:g} s: no version would ever become ready"
            )
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @property
    def quiet(self) -> Quiet | None:
        """The gate on the rate of requests, None when it is off."""
        if not self.quiet_requests_per_s:
            return None
        return Quiet(self.quiet_requests_per_s, self.quiet_window_requests, self.quiet_wait_s)

    @property
    def s3(self) -> S3Settings:
        return S3Settings(self.s3_endpoint, self.s3_region, self.s3_access_key_id, self.s3_secret_file, self.fetch_timeout_s)

    @property
    def sockets_dir(self) -> Path:
        return self.run_dir if self.run_dir is not None else self.store_dir / "run"

    @property
    def host_port(self) -> tuple[str, int]:
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)

    def public_url(self, port: int) -> str:
        """The address that heartbeats announce, given the bound port."""
        if self.url:
            return self.url
        host = self.listen.rpartition(":")[0]
        return f"{'https' if self.tls_cert else 'http'}://{host}:{port}"

    def token(self) -> str | None:
        """The bearer token, read anew so that it can be replaced on disk."""
        if self.token_file is None:
            return None
        try:
            text = self.token_file.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as cause:
            raise RaftmetaError("bad_field", f"token_file {self.token_file} cannot be read: {cause}") from cause
        if not text or any(not 0x21 <= ord(char) <= 0x7E for char in text):
            raise RaftmetaError("bad_field", f"token_file {self.token_file} is empty or holds blanks")
        return text


def _port_faults(config: AgentConfig) -> list[str]:
    """What would open the serving API further than was asked for."""
    is_local = is_loopback(config.host_port[0])
    faults: list[str] = []
    if config.principals_file is None and not config.health_without_token:
        faults.append("health_without_token is false, which takes a principals_file")
    if config.principals_file is None and not config.listen_without_tokens and not is_local:
        faults.append(
            f"listen {config.listen} is not loopback, so principals_file is needed, "
            f"or listen_without_tokens = true to let everybody in who reaches it"
        )
    if config.principals_file is not None and config.listen_without_tokens:
        faults.append("listen_without_tokens contradicts principals_file: leave one out")
    if config.principals_file is not None and config.tls_cert is None and not is_local:
        faults.append(f"listen {config.listen} is not loopback, so tokens need tls_cert and tls_key: in plain text anybody could read them")
    return faults


def load(path: Path) -> AgentConfig:
    """The checked settings of a file. Raises RaftmetaError `bad_field` that lists every fault."""
    return settings.load(AgentConfig, path, _PATHS)


def child_environment(config: AgentConfig) -> dict[str, str]:
    """What a process of the agent is started with: no model library asks a network, and none takes more threads than it was given."""
    threads = str(config.threads)
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }
