"""Whether an entry or a configuration from another member can be read, asked before any of it reaches the disk.

What is in the journal is applied at every start: an entry that cannot be applied would end the member again and again, so it is never
appended. That the commands themselves make sense is apply's to judge, which is total.
"""

from __future__ import annotations

import msgspec

from raftmeta.log import configuration as cfg
from raftmeta.log.hard_state import MAX_VOTE_BYTES
from raftmeta.log.proposals import commands_of
from raftmeta.log.setup import OP_COMMANDS, OP_MEMBERSHIP, OP_NOOP


def payload_fault(payload: bytes) -> str:
    """Why this payload, which is not empty, is no entry of ours; "" when it is one."""
    match payload[0]:
        case opcode if opcode == OP_COMMANDS:
            try:
                commands_of(memoryview(payload)[1:])
            except msgspec.MsgspecError as cause:
                return f"commands that cannot be read: {cause}"
            return ""
        case opcode if opcode == OP_NOOP:
            return ""
        case opcode if opcode == OP_MEMBERSHIP:
            return configuration_fault(payload[1:])
        case opcode:
            return f"opcode {opcode}, which this build does not know"


def configuration_fault(data: bytes) -> str:
    """Why these bytes are no configuration of a cluster; "" when they are one."""
    try:
        ids = cfg.decode(data).ids
    except msgspec.MsgspecError as cause:
        return f"a configuration that cannot be read: {cause}"
    if not ids or list(ids) != sorted(set(ids)):
        return f"a configuration whose members are not one or more in order and without repeats: {', '.join(ids)[:200]}"
    if not all(0 < len(member.encode()) <= MAX_VOTE_BYTES for member in ids):
        return f"a configuration with a member id that is empty or longer than {MAX_VOTE_BYTES} bytes"
    return ""
