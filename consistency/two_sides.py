"""What has to be known of a deployment before its two sides can be asked anything: where its nodes listen, and which questions fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from consistency import live_questions
from consistency.agent_answers import AgentFault
from consistency.live import Question
from consistency.live_agents import LiveAgents
from consistency.target import DeploymentSeen, deployment_of
from raftmeta.cli.exits import UsageFault
from raftmeta.cli.program import MemberOptions
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import Manifest

if TYPE_CHECKING:
    from raftmeta.client import Client

MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class QuestionOptions(MemberOptions):
    deployment: Annotated[str, typer.Argument(metavar="DEPLOYMENT", help="One with both sides.")]
    inputs: Annotated[
        Path | None,
        typer.Option("--inputs", metavar="FILE", help="A JSON object with `inputs` a line; else the version's probes, or drawn numbers."),
    ] = None
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, max=1024, help="Samples in a request of drawn numbers.")] = 8
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of drawn numbers.")] = 1
    node_timeout: Annotated[
        float, typer.Option("--node-timeout", metavar="SECONDS", min=0.1, max=3600, help="For each question to a node.")
    ] = 10.0


@dataclass(frozen=True)
class Sides:
    """Nodes of both sides that serve a deployment, with where they listen. One that no member has heard of is in neither."""

    deployment: str
    primary: Mapping[str, str]
    standby: Mapping[str, str]

    @property
    def urls(self) -> dict[str, str]:
        return {**self.primary, **self.standby}


async def seen_by_members(client: Client, name: str) -> tuple[DeploymentSeen, Sides]:
    """Raises UsageFault for a deployment without a standby, RaftmetaError `starting` while there is nothing to ask."""
    seen = deployment_of(await client.get_deployment(name))
    if seen.standby is None:
        raise UsageFault(f"{seen.name} has one side, so there is nothing to compare", "`raftmeta deploy` declares a standby")
    if not seen.version:
        raise RaftmetaError("starting", f"{seen.name}: no version was activated yet")
    urls = {str(item["node"]): str(item["url"]) for item in (await client.nodes())["items"]}
    primary, standby = ({node: urls[node] for node in side.nodes if node in urls} for side in (seen.primary, seen.standby))
    if not primary or not standby:
        unheard = "standby" if primary else "primary"
        raise RaftmetaError("starting", f"{seen.name}: no member has heard of a node of the {unheard} side")
    return seen, Sides(seen.name, primary, standby)


async def manifest_of(client: Client, model: str, version: str) -> Manifest:
    return msgspec.convert(dict(await client.get_manifest(model, version)), Manifest)


async def questions_for(options: QuestionOptions, sides: Sides, agents: LiveAgents, manifest: Manifest) -> tuple[Iterator[Question], int]:
    """And how many there are, 0 when they are drawn. Raises UsageFault or RaftmetaError."""
    if options.inputs is not None:
        known = live_questions.of_lines(_read(options.inputs))
    else:
        known = live_questions.of_probes(manifest.probes)
    if known:
        return live_questions.in_turn(known), len(known)
    node, url = next(iter(sides.primary.items()))
    try:
        described = await agents.described(url, sides.deployment)
    except AgentFault as fault:
        raise RaftmetaError("starting", f"{node} does not say what {sides.deployment} takes: {fault}") from fault
    return live_questions.drawn(described.inputs, options.batch, options.seed), 0


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageFault(f"{path} has more than {MAX_FILE_BYTES} bytes", "give fewer questions; they are asked in turn")
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise UsageFault(f"{path} cannot be read: {cause}", "name a file of JSON lines, each with `inputs`") from cause
