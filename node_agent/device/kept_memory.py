"""Memory that a keeper holds, and records of its slots that never say more than is true of it.

The memory's name is the identity of the file that holds the records, so no record can speak of other memory. Where the keeper does not hold
it, the records are emptied before it is made: a crash in between leaves memory of which nothing is claimed.
"""

from __future__ import annotations

import os

from node_agent.device.arena import Arena
from node_agent.device.keeper_client import Holding, KeeperClient
from node_agent.device.port import SLOTS
from node_agent.refusal import Refusal


def slot_bytes_of(memory_bytes: int) -> int:
    """Size of each slot, from the memory's size alone, so that whoever attaches later finds the slots where they were.

    An allocation is whole pages, so it is a multiple of what layouts align to.
    """
    return memory_bytes // SLOTS


def attach(records: Arena, keeper: KeeperClient, slot_bytes: int) -> Holding:
    """Memory for two slots of at least this size, made if it is not held.

    Raises Refusal keeper_unavailable, no_headroom or memory_differs.
    """
    need = SLOTS * slot_bytes
    held = keeper.open(records.header.arena_id)
    if held is None:
        for slot in range(SLOTS):
            records.mark_empty(slot)
        return keeper.hold(records.header.arena_id, need)
    if held.size_bytes < need:
        os.close(held.descriptor)
        subject = f"memory {records.header.arena_id} of the keeper"
        raise Refusal("memory_differs", subject, f"at least {need} bytes", f"{held.size_bytes} bytes")
    return held
