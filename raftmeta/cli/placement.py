"""What stands out about where members and the nodes of a deployment are declared to be.

Said and not refused: nodes may come later, and a cluster to try things with may share a zone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from raftmeta.core.naming import named


def of_members(zones: Sequence[str]) -> list[str]:
    """`zones`: of each member."""
    count = len(zones)
    found = []
    if count % 2 == 0:
        found.append(f"{count} members bear the loss of no more than {count - 1} do; take an odd number")
    if count > 1:
        for zone, members in Counter(zones).items():
            if count - members <= count // 2:
                found.append(f"zone {zone} holds {members} of {count} members: while it is away nothing can be decided")
    return found


def of_deployment(declared: Mapping[str, Any], heard: Mapping[str, str]) -> list[str]:
    """`declared`: its sides as the API takes them; `heard`: the zone that each node of which a member heard says it is in."""
    sides = [side for side in (declared["primary"], declared["standby"]) if side is not None]
    nodes = [(node, side["zone"]) for side in sides for node in side["nodes"]]
    found = []
    if silent := [node for node, _ in nodes if node not in heard]:
        found.append(f"no member has heard of {named(silent)}; no version becomes ready before every node is there")
    if elsewhere := [f"{node} (in {heard[node]}, declared in {zone})" for node, zone in nodes if heard.get(node, zone) != zone]:
        found.append(f"nodes that say they are in another zone: {named(elsewhere)}")
    if len(sides) == 2 and sides[0]["zone"] == sides[1]["zone"]:
        found.append(f"both sides are in zone {sides[0]['zone']}: they are lost together")
    return found
