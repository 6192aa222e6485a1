"""The demo's cluster: a directory made by `raftmeta init`, three members and two agents as processes, the CLI as a user would call it.

Everything the story does to the cluster goes through the SDK or through `raftmeta` commands run as processes; nothing here reaches inside.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from raftmeta import strict_json
from raftmeta.cli.demo.errors import DemoError
from raftmeta.cli.demo.processes import Child, Children
from raftmeta.client import Client, Options, Read
from raftmeta.client.config import Connection, load
from raftmeta.core.errors import RaftmetaError

ZONES = ("a", "b", "c")
AGENTS = (("a", "node-a", "primary"), ("b", "node-b", "standby"))  # zone, node, side
PROGRAM = ("-m", "raftmeta.cli.main")
START_S = 60.0  # for members to elect, for agents to import torch and report; a loaded machine takes a third of it
COMMAND_S = 120.0  # one CLI command
MAX_OUTPUT_BYTES = 8 << 20
POLL_S = 0.1


class CommandResult(NamedTuple):
    exit_code: int
    value: Any  # the one JSON value of its standard output
    errors: str  # the end of its standard error


class Fleet:
    """Processes by name; `client` speaks to all members."""

    def __init__(self, directory: Path, children: Children) -> None:
        self.directory = directory / "cluster"
        self._children = children
        self.members: dict[str, Child] = {}
        self.agents: dict[str, Child] = {}

    @property
    def client_config(self) -> Path:
        return self.directory / "client.toml"

    @property
    def ca_file(self) -> Path:
        return self.directory / "ca.pem"

    def token_file(self, role: str) -> Path:
        return self.directory / "tokens" / f"{role}.token"

    def connection(self) -> Connection:
        return load(self.client_config)

    def client(self, urls: Sequence[str] = (), timeout_s: float = 30.0) -> Client:
        """Of all members, or of the given ones."""
        connection = self.connection()
        options = Options(token=connection.token(), ca_file=connection.ca_file, timeout_s=timeout_s)
        return Client(urls or connection.urls, options=options)

    async def init(self, artifact_roots: Sequence[Path], arena_dir: Path) -> None:
        words = ["init", str(self.directory), "--zones", ",".join(ZONES), "--base-port", "0", "--arena-dir", str(arena_dir)]
        for zone, node, _ in AGENTS:
            words += ["--agent", f"{zone}:{node}"]
        for root in artifact_roots:
            words += ["--artifact-root", str(root)]
        await self.command(*words, connected=False)

    def start_member(self, zone: str) -> None:
        config = self.directory / zone / "server.toml"
        self.members[zone] = self._children.start(f"member-{zone}", [*PROGRAM, "server", "--config", str(config)])

    def start_agent(self, node: str) -> None:
        config = self.directory / "agents" / node / "agent.toml"
        self.agents[node] = self._children.start(node, [*PROGRAM, "agent", "--config", str(config)])

    def kill_member(self, zone: str) -> None:
        """SIGKILL, as a machine that loses power."""
        child = self.members.pop(zone)
        self._children.forget(child)
        child.kill()

    def check_alive(self) -> None:
        """Raises DemoError when a process ended that should run."""
        fallen = self._children.fallen()
        if fallen is not None:
            raise DemoError(f"{fallen.name} ended with {fallen.exit_code()}", fallen.tail())

    async def leader(self, client: Client, other_than: str = "") -> dict[str, Any]:
        """The view of a member that knows a leader, once one is elected. Raises DemoError after START_S."""

        async def look() -> dict[str, Any] | None:
            seen = await client.cluster()
            return dict(seen) if seen["leader_id"] not in ("", other_than) else None

        found: dict[str, Any] = await self._poll(look, "no leader was elected")
        return found

    async def nodes(self, client: Client) -> dict[str, dict[str, Any]]:
        """The agents by node, once all have reported and serve an address."""

        async def look() -> dict[str, Any] | None:
            items = {item["node"]: item for item in (await client.nodes())["items"]}
            return (
                items if all(node in items and items[node].get("url") and not items[node].get("missing") for _, node, _ in AGENTS) else None
            )

        found: dict[str, dict[str, Any]] = await self._poll(look, "not every agent reported")
        return found

    async def evidence(self, url: str, deployment: str) -> dict[str, Any]:
        """Which bytes a node serves, as it says. Raises DemoError when it does not."""
        headers = {"authorization": f"Bearer {self.token_file('checker').read_text('ascii').strip()}"}
        verify = ssl.create_default_context(cafile=str(self.ca_file))
        async with httpx.AsyncClient(verify=verify, headers=headers, timeout=COMMAND_S, trust_env=False) as http:
            try:
                response = await http.get(f"{url}/raftmeta/v1/evidence/{deployment}")
            except httpx.HTTPError as cause:
                raise DemoError(f"{url} does not say what it serves: {type(cause).__name__}: {cause}") from cause
        if response.status_code != 200:
            raise DemoError(f"{url} does not say what it serves: {response.status_code} {response.text[:200]}")
        return strict_json.load_object(response.content, MAX_OUTPUT_BYTES)

    async def caught_up(self, zone: str, revision: int) -> None:
        """Wait until the member serves `revision` from its own state."""
        url = self.connection().urls[ZONES.index(zone)]

        async def look() -> bool:
            async with self.client([url], timeout_s=2.0) as client:
                return (await client.cluster(Read(stale=True))).revision >= revision

        await self._poll(look, f"member {zone} did not catch up with revision {revision}")

    async def command(self, *words: str, connected: bool = True, answers: Sequence[int] = (0,)) -> CommandResult:
        """Run `raftmeta WORDS --json`. Raises DemoError for an exit code that is not among `answers`."""
        arguments = [*PROGRAM, *words, "--json", *(["--config", str(self.client_config)] if connected else [])]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._children.environment,
            limit=MAX_OUTPUT_BYTES,
        )
        try:
            async with asyncio.timeout(COMMAND_S):
                out, err = await process.communicate()
        except TimeoutError as cause:
            raise DemoError(f"raftmeta {words[0]} did not end within {COMMAND_S:g} s") from cause
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        errors = err.decode("utf-8", "replace")[-4000:]
        code = process.returncode or 0
        if code not in answers:
            raise DemoError(f"raftmeta {' '.join(words)} ended with {code}", (out.decode("utf-8", "replace")[-2000:] + errors).strip())
        try:
            return CommandResult(code, strict_json.loads(out, MAX_OUTPUT_BYTES), errors)
        except RaftmetaError as cause:
            raise DemoError(f"raftmeta {words[0]} --json did not print JSON: {cause.detail}", errors) from cause

    async def _poll(self, look: Any, failure: str) -> Any:
        deadline = time.monotonic() + START_S
        last = ""
        while time.monotonic() < deadline:
            self.check_alive()
            try:
                if found := await look():
                    return found
            except RaftmetaError as error:
                last = f"; the last answer was {error}"
            await asyncio.sleep(POLL_S)
        raise DemoError(f"{failure} within {START_S:g} s{last}", "\n".join(child.tail() for child in self.members.values())[-4000:])
