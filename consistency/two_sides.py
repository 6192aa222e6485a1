"""What has to be known of a deployment before its sides can be asked: where nodes listen, which questions fit, how much a side answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from consistency import live_questions
from consistency.agent_answers import AgentFault
from consistency.live import Question
from consistency.live_agents import LiveAgents, Spec
from consistency.target import DeploymentSeen, deployment_of
from raftmeta.cli.exits import Advised, Unusable, UsageFault
from raftmeta.cli.program import MemberOptions
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import Manifest

if TYPE_CHECKING:
    from raftmeta.client import Client

MAX_FILE_BYTES = 64 << 20
WARM_REQUESTS = 5  # of each node that has computed nothing yet
MAX_EXAMPLE = 64  # numbers of an input in an example
TOKEN_HINT = "give a token of role checker or admin"
_ANY_LENGTH = 4  # what an example has where any size fits
_PROBES = "`raftmeta probe DIR --out FILE` makes probes, `raftmeta publish … --probes FILE` publishes a version with them"


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
        what = f"{seen.name}: no version was activated yet"
        raise Advised(
            "starting", what, f"`raftmeta activate {seen.name} VERSION` lets one serve; `raftmeta versions {seen.model}` lists them"
        )
    urls = {str(item["node"]): str(item["url"]) for item in (await client.nodes())["items"]}
    primary, standby = ({node: urls[node] for node in side.nodes if node in urls} for side in (seen.primary, seen.standby))
    if not primary or not standby:
        unheard = "standby" if primary else "primary"
        what = f"{seen.name}: no member has heard of a node of the {unheard} side"
        raise Advised("starting", what, f"`raftmeta agent --config FILE` starts one; `raftmeta status {seen.name}` shows who is heard")
    return seen, Sides(seen.name, primary, standby)


async def manifest_of(client: Client, model: str, version: str) -> Manifest:
    return msgspec.convert(dict(await client.get_manifest(model, version)), Manifest)


async def questions_for(options: QuestionOptions, sides: Sides, agents: LiveAgents, manifest: Manifest) -> tuple[Iterator[Question], int]:
    """And how many there are, 0 when they are drawn. Raises UsageFault or RaftmetaError."""
    if options.inputs is not None:
        known = questions_of(options.inputs)
    else:
        known = live_questions.of_probes(manifest.probes)
    if known:
        return live_questions.in_turn(known), len(known)
    node, url = next(iter(sides.primary.items()))
    try:
        described = await agents.described(url, sides.deployment)
    except AgentFault as fault:
        raise unasked(f"{node} does not say what {sides.deployment} takes: {fault}", fault, sides.deployment) from fault
    try:
        return live_questions.drawn(described.inputs, options.batch, options.seed), 0
    except RaftmetaError as cause:
        raise Unusable(cause, f"{_PROBES}; or --inputs FILE with lines like {example_line(described.inputs)}") from cause


def example_line(specs: Sequence[Spec]) -> str:
    """A line of --inputs that the model takes, as far as the shapes and types tell."""
    made = []
    for spec in specs:
        shape = [dim if dim > 0 else _ANY_LENGTH if at else 1 for at, dim in enumerate(spec.shape)]
        value = "a text" if spec.datatype == "BYTES" else True if spec.datatype == "BOOL" else 0.5 if "FP" in spec.datatype else 1
        data = [value] * min(math.prod(shape), MAX_EXAMPLE)
        made.append({"name": spec.name[:80], "datatype": spec.datatype[:20], "shape": shape, "data": data})
    return msgspec.json.encode({"inputs": made}).decode()


def unasked(what: str, fault: AgentFault, deployment: str) -> RaftmetaError:
    """Why a node cannot be asked, with what helps."""
    status = f"`raftmeta status {deployment}` shows who is heard"
    if fault.status in (401, 403):
        code = "unauthenticated" if fault.status == 401 else "forbidden"
        return Unusable(RaftmetaError(code, what), f"{TOKEN_HINT}, in token_file of client.toml or in the file of RAFTMETA_TOKEN_FILE")
    if fault.status in (400, 422):
        return Unusable(RaftmetaError("bad_field", what), f"the questions do not fit the model; {_PROBES}; or give --inputs FILE")
    if fault.code in ("unreachable", "timed_out"):
        return Advised("agent_unreachable", what, f"{status}; `raftmeta agent --config FILE` starts a node again")
    if fault.code in ("untrusted", "insecure_url"):
        return Unusable(
            RaftmetaError("bad_field", what), "set ca_file in client.toml to the authority of the nodes, which listen at https://"
        )
    return Advised("starting", what, f"{status}; repeat this once READY says yes")


async def capacity_of(sides: Sides, agents: LiveAgents, question: Question) -> float:
    """Requests a second of the smaller side, from what its nodes have counted. Raises RaftmetaError where one does not say."""
    found = []
    for side in (sides.primary, sides.standby):
        found.append(sum([await _node_capacity(agents, node, url, sides.deployment, question) for node, url in side.items()]))
    return min(found)


async def capacity_if_told(sides: Sides, agents: LiveAgents, question: Question, rate: float | None) -> float:
    """The same; 0 where a node does not say it and nobody needs it, because the rate is given."""
    try:
        return await capacity_of(sides, agents, question)
    except RaftmetaError:
        if rate is None:
            raise
        return 0.0


async def _node_capacity(agents: LiveAgents, node: str, url: str, deployment: str, question: Question) -> float:
    try:
        seen = await agents.capacity(url, deployment)
        if not seen.compute_s:
            for _ in range(WARM_REQUESTS):
                await agents.infer(url, deployment, question.body)
            seen = await agents.capacity(url, deployment)
    except AgentFault as fault:
        raise unasked(f"{node} does not say how much it computes ({fault}); --rate goes without", fault, deployment) from fault
    return seen.requests_per_s


def questions_of(path: Path) -> list[Question]:
    """Of a file of JSON lines. Raises UsageFault, or RaftmetaError bad_field with the number of the line."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageFault(f"{path} has more than {MAX_FILE_BYTES} bytes", "give fewer questions; they are asked in turn")
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise UsageFault(f"{path} cannot be read: {cause}", "name a file of JSON lines, each with `inputs`") from cause
    return live_questions.of_lines(text)
