"""What clients did to registers and what they were told: a history, which the checkers of linearizability judge."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec


class Operation(msgspec.Struct, frozen=True):
    client: int
    key: str
    kind: str  # "write" | "read"
    value: str  # written or read; "" = the key is absent
    invoked: float  # monotonic seconds
    returned: float | None  # None: never answered
    revision: int = 0  # of the reply, 0 when there is none; a read's is the one it was served at


def refuse_malformed(history: Sequence[Operation]) -> None:
    for operation in history:
        if operation.kind not in ("write", "read"):
            raise ValueError(f"an operation is a write or a read, this one is neither: {operation}")
        if operation.returned is not None and not operation.returned >= operation.invoked:
            raise ValueError(f"an operation returns after it began, this one did not: {operation}")


def by_key(history: Sequence[Operation]) -> dict[str, list[Operation]]:
    keys: dict[str, list[Operation]] = defaultdict(list)
    for operation in history:
        keys[operation.key].append(operation)
    return keys


def say(operation: Operation) -> str:
    did = f"client {operation.client} {'wrote' if operation.kind == 'write' else 'read'} {operation.key!r} = {say_value(operation.value)}"
    if operation.returned is None:
        return f"{did} from {operation.invoked:.6f} on, unanswered"
    revision = f", revision {operation.revision}" if operation.revision else ""
    return f"{did} from {operation.invoked:.6f} to {operation.returned:.6f}{revision}"


def say_value(value: str) -> str:
    return repr(value) if value else "absent"
