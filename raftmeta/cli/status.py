"""`raftmeta status` and `raftmeta versions`: which version serves where, and what there is to serve."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raftmeta.cli import output
from raftmeta.cli.exits import Exit
from raftmeta.cli.program import MemberOptions, command

if TYPE_CHECKING:  # httpx costs 100 ms that `--help` must not pay
    from raftmeta.client import Client

MAX_ROWS = 1_000  # shown by one call; the JSON of the API pages further


@dataclass(frozen=True, kw_only=True)
class StatusOptions(MemberOptions):
    deployment: Annotated[str | None, typer.Argument(metavar="[DEPLOYMENT]", help="Only this one.")] = None


@dataclass(frozen=True, kw_only=True)
class VersionsOptions(MemberOptions):
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="List its versions; without it, list models.")] = None


def _status(options: StatusOptions) -> int:
    """Show which version serves where, what is on its way, and the last proof that both sides hold the same bytes."""

    async def work() -> dict[str, Any]:
        async with options.connect() as client:
            return await collect(client, options.deployment)

    seen = asyncio.run(work())
    if options.json:
        output.print_json(seen)
    else:
        _print_status(seen)
    return Exit.OK


async def collect(client: Client, name: str | None) -> dict[str, Any]:
    """Deployments with their rollouts, the nodes and the verdicts, each as the API gives them."""
    from raftmeta.client import Page

    if name is None:
        deployments = (await client.list_deployments(Page(MAX_ROWS)))["items"]
    else:
        deployments = [dict(await client.get_deployment(name))]
    rollouts = {}
    for deployment in deployments:
        if deployment["rollout_id"]:
            rollouts[deployment["name"]] = dict(await client.get_rollout(deployment["rollout_id"]))
    nodes = await client.nodes()
    verdicts = (await client.consistency())["items"]
    return {
        "revision": nodes.revision,
        "generation": nodes.generation,
        "deployments": deployments,
        "rollouts": rollouts,
        "nodes": nodes["items"],
        "consistency": [item for item in verdicts if name is None or item["deployment"] == name],
    }


def _print_status(seen: dict[str, Any]) -> None:
    out = output.console()
    if not seen["deployments"]:
        out.print("no deployments yet; next: raftmeta publish DIR --model MODEL --label LABEL, then raftmeta deploy", markup=False)
    nodes = {item["node"]: item for item in seen["nodes"]}
    verdicts = {item["deployment"]: item for item in seen["consistency"]}
    for deployment in seen["deployments"]:
        name = deployment["name"]
        verdict = verdicts.get(name)
        checked = f"{verdict['verdict']} at {output.clock(verdict['recorded_ms'])}" if verdict else "never checked"
        out.print(
            output.table(
                ("DEPLOYMENT", "MODEL", "SERVES", "PREVIOUS", "CHECK"),
                [(name, deployment["model"], deployment["version"], deployment["previous"], checked)],
            )
        )
        if deployment.get("failover"):
            out.print("  " + failover_text(deployment), markup=False)
        _print_rollout(out, seen["rollouts"].get(name))
        out.print(output.table(("  SIDE", "ZONE", "NODE", "SERVES", "READY", "HEARD"), side_rows(deployment, nodes)))
        for line in why_lines(deployment, nodes):
            out.print(line, markup=False, soft_wrap=True)
        out.print()
    out.print(f"revision {seen['revision']}, generation {seen['generation']}", style="dim", markup=False)


def failover_text(deployment: dict[str, Any]) -> str:
    """Which side takes requests, since when and on whose word."""
    decided = deployment["failover"]
    forced = f", forced over {', '.join(decided['overridden']) or 'nothing'}" if decided["forced"] else ""
    who = f"{output.printable(decided['principal'])} at {output.clock(decided['decided_ms'])}"
    return f"the {deployment['serving_side']} side takes requests, decided by {who}{forced}"


def _print_rollout(out: Any, rollout: dict[str, Any] | None) -> None:
    from raftmeta.cli.follow import describe, failure_text

    if rollout is None or rollout["status"] == "done":
        return
    out.print("  " + describe(rollout), style="yellow" if rollout["status"] == "running" else "red", markup=False)
    if rollout["status"] == "failed":
        out.print("  " + output.printable(failure_text(rollout)), markup=False)


def side_rows(deployment: dict[str, Any], nodes: dict[str, dict[str, Any]]) -> list[tuple[object, ...]]:
    """One row per node of both sides, with what it last reported."""
    rows: list[tuple[object, ...]] = []
    for side, node, seen, serving in _heard(deployment, nodes):
        if seen is None:
            heard = "never"
        else:
            heard = "missing" if seen.get("missing") else f"{seen.get('age_ms', 0)} ms ago"
        version, ready = serving.get("version", ""), ("yes" if serving.get("ready") else "no") if seen else ""
        if seen and seen.get("missing"):  # what it said last, which nobody knows to be so
            version, ready = f"({version})" if version else "", "?"
        rows.append(("  " + side, deployment[side]["zone"], node, version, ready, heard))
    return rows


def why_lines(deployment: dict[str, Any], nodes: dict[str, dict[str, Any]]) -> list[str]:
    """What nodes said last of why they are not ready, or stay where they are."""
    return [output.printable(f"  {node}: {said['why']}") for _, node, _, said in _heard(deployment, nodes) if said.get("why")]


def _heard(
    deployment: dict[str, Any], nodes: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, str, dict[str, Any] | None, dict[str, Any]]]:
    """Side and name of each node, its last heartbeat if there was one, and what that says of this deployment."""
    for side in ("primary", "standby"):
        for node in (deployment[side] or {}).get("nodes", ()):
            seen = nodes.get(node)
            yield side, node, seen, ((seen or {}).get("deployments") or {}).get(deployment["name"], {})


def _versions(options: VersionsOptions) -> int:
    """List the models, or the versions of one model, newest number last."""

    async def work() -> dict[str, Any]:
        from raftmeta.client import Page

        async with options.connect() as client:
            if options.model is None:
                return await client.list_models(Page(MAX_ROWS))
            return await client.list_versions(options.model, Page(MAX_ROWS))

    reply = asyncio.run(work())
    if options.json:
        output.print_json(dict(reply))
        return Exit.OK
    out = output.console()
    if options.model is None:
        rows = [(item["name"], item["version_count"], item["last_number"], output.clock(item["created_ms"])) for item in reply["items"]]
        out.print(output.table(("MODEL", "VERSIONS", "LAST NUMBER", "SINCE"), rows))
    else:
        out.print(
            output.table(
                ("NUMBER", "LABEL", "CHECKSUM", "SIZE", "TENSORS", "PUBLISHED", "BY"), [_version_row(item) for item in reply["items"]]
            )
        )
    if reply.get("next"):
        out.print(f"more than {MAX_ROWS}; the rest with GET …?after={output.printable(reply['next'])}", style="dim", markup=False)
    return Exit.OK


def _version_row(item: dict[str, Any]) -> tuple[object, ...]:
    return (
        item["number"],
        item["label"],
        output.short(item["checksum"]),
        output.size(item["size_bytes"]),
        item["tensor_count"],
        output.clock(item["published_ms"]),
        item["principal"],
    )


status = command("status", StatusOptions, _status)
versions = command("versions", VersionsOptions, _versions)
