"""What lies in memory beside the weights of a deployment: headers, the active word, and the lists of tensors.

Workers that start read them, and the scrub needs the lists; what serves needs none of them. So one that is damaged shows late, and is
written again where it is not as this process knows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from node_agent.device.arena import Arena
from node_agent.device.control_block import ControlBlock
from node_agent.device.port import SLOTS, SlotRecord, SlotState
from node_agent.device.snapshot import Snapshots
from node_agent.runtime import log
from node_agent.slots import Switch

LISTS_NS: Final = 5_000_000_000  # between looks at the lists of tensors, megabytes for large versions


class BesideWeights:
    def __init__(self, deployment: str, block: ControlBlock, switch: Switch, snapshots: Snapshots, clock_ns: Callable[[], int]) -> None:
        self._deployment = deployment
        self._block, self._switch, self._snapshots = block, switch, snapshots
        self._clock_ns = clock_ns
        self._lists_due_ns = 0  # when the lists of tensors are compared again

    def mend(self, arena: Arena | None, record_of: Callable[[int], SlotRecord]) -> None:
        """`record_of`: what a slot is said to hold. Logs what was damaged, and what could not be written."""
        damaged = []
        if self._switch.mend():
            damaged.append("the active word")
        if self._block.mend_header():
            damaged.append("the header of the control block")
        if arena is not None and arena.mend_header():
            damaged.append("the header of the arena")
        if self._clock_ns() >= self._lists_due_ns:
            self._lists_due_ns = self._clock_ns() + LISTS_NS
            try:
                damaged += [f"the list of slot {slot}" for slot in range(SLOTS) if self._mend_list(slot, record_of(slot))]
            except OSError as cause:
                log.error("snapshot_not_written", deployment=self._deployment, reason=str(cause))
        if damaged:
            log.error("memory_beside_weights_mended", deployment=self._deployment, damaged=damaged)

    def _mend_list(self, slot: int, record: SlotRecord) -> bool:
        return record.state is SlotState.VERIFIED and self._snapshots.mend(slot, record.snapshot_digest)
