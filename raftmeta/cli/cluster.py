"""`raftmeta cluster status`: the members as the answering one sees them. Exit code 2 without a leader."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from raftmeta.cli import output
from raftmeta.cli.exits import Exit
from raftmeta.cli.program import MemberOptions, command


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(MemberOptions):
    pass


def _status(options: ClusterOptions) -> int:
    """Show members, leader and how far each has come. Exit code 2 when no leader is known.

    The answer is one member's own view and needs no quorum, so it is there when you need it most.
    """

    async def work() -> dict[str, Any]:
        from raftmeta.client import STALE

        async with options.connect() as client:
            return await client.cluster(STALE)

    seen = asyncio.run(work())
    if options.json:
        output.print_json(dict(seen))
    else:
        out = output.console()
        columns = ("MEMBER", "ZONE", "ROLE", "MATCH INDEX", "PEERS AT", "API")
        out.print(output.table(columns, [_row(item) for item in seen["members"]]))
        out.print()
        for line in summary(seen):
            out.print(line, markup=False)
    return Exit.OK if seen["leader_id"] else Exit.UNAVAILABLE


def _row(item: dict[str, Any]) -> tuple[object, ...]:
    match = item["match_index"]
    return (item["id"], item["zone"], item["role"], match if match >= 0 else "", item["peer_address"], item["api_url"])


def summary(seen: dict[str, Any]) -> list[str]:
    """The figures that belong to the whole cluster."""
    lines = [
        f"cluster {seen['cluster_id']}, seen from {seen['member_id']} ({seen['role']})",
        f"leader {seen['leader_id'] or 'unknown'}, term {seen['term']}, committed index {seen['commit_index']}",
        f"revision {seen['revision']}, generation {seen['generation']}, feature level {seen['feature_level']}",
        f"state hash {seen['state_hash']}",
        f"journal {output.size(seen['journal_bytes'])}, last sync {seen['sync_ms']:.2f} ms",
    ]
    if not seen.get("caught_up", True):
        lines.append("this member has not caught up with the others yet")
    if seen.get("fault"):
        lines.append(f"fault: {output.printable(seen['fault'])}")
    return lines


status = command("cluster status", ClusterOptions, _status)
