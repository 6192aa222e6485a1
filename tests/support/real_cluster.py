"""Real members as processes on loopback, made by `raftmeta init`, spoken to over HTTP; killed and restarted by id."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import ssl
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from raftmeta.cli.init import InitOptions, run
from raftmeta.core import manifest as m

START_S = 30.0
PROGRAM = (sys.executable, "-m", "raftmeta.cli.main")


def manifest(seed: str) -> dict[str, Any]:
    """A sound manifest of one tiny tensor, another one for each seed."""
    digest = hashlib.sha256(seed.encode()).hexdigest()
    return {
        "format": m.FORMAT,
        "engine": "hf",
        "files": [{"name": "model.safetensors", "size_bytes": 8, "sha256": digest, "role": "weights"}],
        "tensors": [
            {
                "name": "w",
                "dtype": "F32",
                "shape": [2],
                "file": "model.safetensors",
                "begin": 0,
                "end": 8,
                "sha256": digest,
                "entry": digest,
            }
        ],
        "unbound": [],
        "vector_root": digest,
        "sources": ["file:///nowhere/"],
    }


class Server:
    """One member process."""

    def __init__(self, arguments: Sequence[str], log: Path, prefix: Sequence[str] = ()) -> None:
        self._arguments, self._log, self._prefix = tuple(arguments), log, tuple(prefix)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert self.process is None
        with self._log.open("ab") as output:
            self.process = subprocess.Popen(
                [*self._prefix, *PROGRAM, "server", *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL to the process and what traces it."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        self.process = None

    def terminate(self, timeout_s: float = 15.0) -> int:
        """SIGTERM; its exit status."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGTERM)
        status = self.process.wait(timeout_s)
        self.process = None
        return status

    def exited(self, timeout_s: float = 15.0) -> int:
        """Wait for it to end by itself; its exit status."""
        assert self.process is not None
        status = self.process.wait(timeout_s)
        self.process = None
        return status

    def text(self) -> str:
        return self._log.read_text(errors="replace")


class RealCluster:
    """Members in the order of the zones. `prefix(zone)` is put before a member's command, e.g. strace."""

    def __init__(
        self,
        directory: Path,
        zones: Sequence[str] = ("a", "b", "c"),
        prefix: Callable[[str], Sequence[str]] = lambda zone: (),
        *,
        plain_api: bool = False,
    ) -> None:
        """`plain_api`: the API without TLS, so that a witness outside can read what it sends; the links between members keep theirs."""
        made = run(directory / "cluster", list(zones), InitOptions(base_port=0))
        self.directory = made.directory
        client = tomllib.loads((made.directory / "client.toml").read_text())
        self.urls: dict[str, str] = dict(zip(zones, client["urls"], strict=True))
        token = (made.directory / client["token_file"]).read_text().strip()
        if plain_api:
            self.urls = {zone: url.replace("https:", "http:") for zone, url in self.urls.items()}
        context = ssl.create_default_context(cafile=str(made.directory / client["ca_file"]))
        self._http = httpx.Client(verify=context, headers={"Authorization": f"Bearer {token}"}, timeout=10.0, trust_env=False)
        logs = directory / "logs"
        logs.mkdir()
        self.servers = {}
        for zone, file in zip(zones, made.servers, strict=True):
            if plain_api:
                _without_api_tls(file)
            self.servers[zone] = Server(["--config", str(file)], logs / f"{zone}.log", prefix(zone))

    def __enter__(self) -> RealCluster:
        for server in self.servers.values():
            server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()
        for server in self.servers.values():
            if server.process is not None:
                server.kill()

    def get(self, zone: str, path: str) -> httpx.Response:
        return self._http.get(self.urls[zone] + path)

    def put(self, zone: str, path: str, body: dict[str, Any], key: str | None = None) -> httpx.Response:
        return self._http.put(self.urls[zone] + path, json=body, headers={"Idempotency-Key": key} if key else {})

    def publish(self, zone: str, label: str, key: str | None = None) -> httpx.Response:
        return self.put(zone, f"/v1/models/m/versions/{label}", {"manifest": manifest(label)}, key)

    def wait_ready(self, zones: Sequence[str] | None = None) -> None:
        """Until every member answers that it is ready."""
        waiting = list(zones or self.servers)
        deadline = time.monotonic() + START_S
        while waiting and time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if self.get(waiting[0], "/readyz").status_code == 200:
                    waiting.pop(0)
                    continue
            time.sleep(0.05)
        assert not waiting, f"{waiting} did not get ready: " + "\n".join(self.servers[zone].text()[-800:] for zone in waiting)

    def leader(self, among: Sequence[str] | None = None) -> str:
        """The zone of the leader, once the members agree on one that is up."""
        zones = list(among or self.servers)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for zone in zones:
                with contextlib.suppress(httpx.HTTPError):
                    found = self.get(zone, "/v1/cluster?consistency=stale").json()
                    if found.get("role") == "leader":
                        return zone
            time.sleep(0.05)
        raise AssertionError("no leader: " + "\n".join(server.text()[-800:] for server in self.servers.values()))


def _without_api_tls(file: Path) -> None:
    table = ""
    kept = []
    for line in file.read_text().replace("https://", "http://").splitlines():
        table = line.strip() if line.startswith("[") else table
        if table != "[api]" or line.split("=")[0].strip() not in ("certificate", "key"):
            kept.append(line)
    file.write_text("\n".join(kept) + "\n")


@contextlib.contextmanager
def development(directory: Path, port: int, prefix: Sequence[str] = ()) -> Iterator[tuple[Server, httpx.Client]]:
    """`raftmeta server` without configuration, on a port of its own."""
    server = Server(
        ["--data-dir", str(directory / "data")], directory / "server.log", [*prefix, "env", f"RAFTMETA_API__LISTEN=127.0.0.1:{port}"]
    )
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10.0, trust_env=False) as client:
        try:
            yield server, client
        finally:
            if server.process is not None:
                server.kill()


def wait_ready(client: httpx.Client) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if client.get("/readyz").status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError("the member did not get ready")
