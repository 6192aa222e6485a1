"""A primary and a standby as processes beside one control plane, serving small described modules that both may be asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from consistency.artifact import build_manifest
from tests.support.agent_process import AgentProcess, Driver
from tests.support.described_module import write_version
from tests.support.fake_control_plane import FakeControlPlane

DEPLOYMENT = "search"


class TwoSides:
    """Nodes n1 (primary, zone a) and n2 (standby, zone b); versions 1.0.0 to 3.0.0 of a chain of layers are published."""

    def __init__(self, root: Path, arena_dir: Path, **settings: object) -> None:
        self.arena_dir = arena_dir
        self.plane = FakeControlPlane()
        self.plane.start()
        self.driver = Driver(self.plane)
        given = {"engines": ["torch_module"]} | settings
        self.primary, self.standby = (AgentProcess(root / node, arena_dir, self.plane.url, node=node, **given) for node in ("n1", "n2"))
        for number in (1, 2, 3):
            directory = write_version(root / "artifacts" / f"v{number}", number)
            manifest = build_manifest(directory, sources=[directory.as_uri() + "/"], engine="torch_module", unbound=[])
            self.driver.publish(f"{number}.0.0", manifest)
        sides = {"primary": {"zone": "a", "nodes": ["n1"]}, "standby": {"zone": "b", "nodes": ["n2"]}}
        self.driver.call(lambda client: client.declare_deployment(DEPLOYMENT, {"model": "tiny", **sides}))

    @property
    def agents(self) -> tuple[AgentProcess, AgentProcess]:
        return self.primary, self.standby

    def start(self) -> None:
        for agent in self.agents:
            agent.start()

    def serve(self, label: str) -> None:
        """Both sides at rest on this version."""
        if self.driver.serving != label:
            done = self.driver.activate(label)
            assert done["status"] == "done", (done, self.primary.log[-2000:], self.standby.log[-2000:])
        for agent in self.agents:
            agent.until_settled(label)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command of `raftmeta` that talks to these members."""
        whole = [sys.executable, "-m", "raftmeta.cli.main", *words, "--url", self.plane.url]
        return subprocess.run(whole, capture_output=True, text=True, timeout=240, check=False)

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        self.plane.close()


def evidence(agent: AgentProcess) -> dict[str, Any]:
    found: dict[str, Any] = agent.get(f"/raftmeta/v1/evidence/{DEPLOYMENT}").json()
    return found
