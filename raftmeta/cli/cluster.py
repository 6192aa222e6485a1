"""`raftmeta cluster status`: the members as the answering one sees them; `raftmeta cluster raise-level`: after an update of all of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from raftmeta.cli import output
from raftmeta.cli.exits import Exit
from raftmeta.cli.program import MemberOptions, command
from raftmeta.core.errors import RaftmetaError

LEADER_S = 2.0  # for the leader to say how far the others have come


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(MemberOptions):
    pass


@dataclass(frozen=True, kw_only=True)
class RaiseOptions(MemberOptions):
    level: Annotated[
        int | None, typer.Argument(metavar="[LEVEL]", min=1, max=1000, help="Without it the highest that every member can run.")
    ] = None


def _status(options: ClusterOptions) -> int:
    """Show members, leader and how far each has come. Exit code 2 when no leader is known.

    The answer is one member's own view and needs no quorum, so it is there when you need it most.
    """

    async def work() -> dict[str, Any]:
        from raftmeta.client import STALE

        async with options.connect() as client:
            seen, url = dict(await client.cluster(STALE)), client.current_url
        return seen | await _from_leader(options, seen, url)

    seen = asyncio.run(work())
    if options.json:
        output.print_json(seen)
    else:
        out = output.console()
        columns = ("MEMBER", "ZONE", "ROLE", "MATCH INDEX", "CAN RUN LEVEL", "PEERS AT", "API")
        out.print(output.table(columns, [_row(item) for item in seen["members"]]))
        out.print()
        for line in summary(seen):
            out.print(line, markup=False)
    return Exit.OK if seen["leader_id"] else Exit.UNAVAILABLE


async def _from_leader(options: ClusterOptions, seen: dict[str, Any], asked_url: str) -> dict[str, Any]:
    """The members with how far each has come, which the leader alone knows; {} where it is the one that answered, or cannot be asked."""
    from raftmeta.client import STALE

    leader = next((item for item in seen["members"] if item["id"] == seen["leader_id"] != seen["member_id"]), None)
    # What another member says about addresses sends no token over a plainer connection than the one that was asked for.
    if leader is None or leader["api_url"].partition(":")[0] != asked_url.partition(":")[0]:
        return {}
    near = replace(options, url=[leader["api_url"]], timeout=min(options.timeout or LEADER_S, LEADER_S))
    try:
        async with near.connect(lambda _: None) as client:
            told = await client.cluster(STALE)
    except RaftmetaError:  # the answer of the member that was asked stands
        return {}
    if told["role"] != "leader":
        return {}
    match = {item["id"]: item["match_index"] for item in told["members"]}
    members = [item | {"match_index": match.get(item["id"], item["match_index"])} for item in seen["members"]]
    return {"members": members, "match_index_from": told["member_id"]}


def _row(item: dict[str, Any]) -> tuple[object, ...]:
    match = item["match_index"]
    level = item.get("feature_level") or ""
    return (item["id"], item["zone"], item["role"], match if match >= 0 else "", level, item["peer_address"], item["api_url"])


def summary(seen: dict[str, Any]) -> list[str]:
    """The figures that belong to the whole cluster."""
    lines = [
        f"cluster {seen['cluster_id']}, seen from {seen['member_id']} ({seen['role']})",
        f"leader {seen['leader_id'] or 'unknown'}, term {seen['term']}, committed index {seen['commit_index']}",
        f"revision {seen['revision']}, generation {seen['generation']}, feature level {seen['feature_level']}",
        f"state hash {seen['state_hash']}",
        f"journal {output.size(seen['journal_bytes'])}, last sync {seen['sync_ms']:.2f} ms",
    ]
    if seen.get("match_index_from"):
        lines.append(f"match index as the leader {seen['match_index_from']} says it")
    if not seen.get("caught_up", True):
        lines.append("this member has not caught up with the others yet")
    if seen.get("fault"):
        lines.append(f"fault: {output.printable(seen['fault'])}")
    return lines


def _raise_level(options: RaiseOptions) -> int:
    """Let the members write what a newer build brought, once every one of them runs it. This cannot be taken back.

    Refused while a member runs a build that does not know the level, or is away: it may come back with the build that it had.
    """

    async def work() -> tuple[int, dict[str, Any]]:
        async with options.connect() as client:
            seen = await client.cluster()
            before = int(seen["feature_level"])
            known = [int(item.get("feature_level", 0)) for item in seen["members"]]  # 0: away, which the member refuses by name
            wanted = options.level or max(before, min((level for level in known if level), default=before))
            reply: dict[str, Any] = {"feature_level": before, "revision": seen.revision}
            for level in range(before + 1, wanted + 1) if wanted > before else (wanted,):
                reply = dict(await client.raise_feature_level(level))
            return before, reply

    before, reply = asyncio.run(work())
    if options.json:
        output.print_json({"before": before, **reply})
    else:
        now = reply["feature_level"]
        what = f"is at feature level {now} already" if now == before else f"rose from feature level {before} to {now}"
        output.console().print(f"the cluster {what}", markup=False)
    return Exit.OK


status = command("cluster status", ClusterOptions, _status)
raise_level = command("cluster raise-level", RaiseOptions, _raise_level)
