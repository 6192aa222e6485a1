"""What one control process knows of slots beyond their records: what it compared, what workers bound, what a whole reading found. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from node_agent.device.port import SlotRecord


class Checked(NamedTuple):
    """This process compared the vector of a slot: of which record, during which rollout ("" outside one), when by the wall clock."""

    record: SlotRecord
    change: str
    at_ms: int
    at_ns: int  # the same by the monotonic clock
    finding: str = ""  # failure class of what a later comparison found, "" when none did


class Warmed(NamedTuple):
    """Every worker has bound and warmed a slot; `derived`: SHA-256 of what their modules hold outside it."""

    record: SlotRecord
    change: str
    derived: Mapping[str, str]


class Whole(NamedTuple):
    """What a reading of a whole slot found, whether it compared or not, and when it began by the monotonic clock."""

    slot: int
    record: SlotRecord
    root: str
    began_ns: int


def counts(check: Checked | Warmed | None, held: SlotRecord, change: str | None) -> bool:
    """`change` None: a check by this process counts, whatever it was for."""
    return check is not None and check.record == held and change in (None, check.change)
