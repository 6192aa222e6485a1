"""Every way in which a node refuses to change what it serves, with what happens next.

One table of kinds. A refusal says which step of an activation it stopped (phase), which thing it speaks of, what was expected and what was
found; it is raised before anything that serves was touched. The kind is what an attestation carries as its failure code, so kinds are
added and never renamed.
"""

from __future__ import annotations

from raftmeta.core.errors import ErrorClass

REFUSALS: dict[str, ErrorClass] = {
    # room and the machine
    "no_headroom": ErrorClass.CAPACITY,
    "barrier_unavailable": ErrorClass.UNAVAILABLE,
    "no_device": ErrorClass.INVALID,
    "device_failed": ErrorClass.UNAVAILABLE,
    "device_late": ErrorClass.UNAVAILABLE,
    # the files in shared memory
    "foreign_arena": ErrorClass.INTEGRITY,
    "arena_in_use": ErrorClass.REJECTED,
    "foreign_control_block": ErrorClass.INTEGRITY,
    "control_in_use": ErrorClass.REJECTED,
    "worker_alive": ErrorClass.REJECTED,
    # memory that a keeper holds
    "keeper_unavailable": ErrorClass.UNAVAILABLE,
    "keeper_in_use": ErrorClass.REJECTED,
    "memory_differs": ErrorClass.REJECTED,
    # slots
    "slot_active": ErrorClass.REJECTED,
    "slot_busy": ErrorClass.UNAVAILABLE,
    "slot_not_dirty": ErrorClass.REJECTED,
    "slot_not_verified": ErrorClass.INTEGRITY,
    "nothing_serves": ErrorClass.UNAVAILABLE,
    "not_quiet": ErrorClass.UNAVAILABLE,
    "no_second_slot": ErrorClass.CAPACITY,
    "engine_unavailable": ErrorClass.UNAVAILABLE,
    # bytes
    "bad_layout": ErrorClass.INVALID,
    "source_failed": ErrorClass.UNAVAILABLE,
    "vector_mismatch": ErrorClass.INTEGRITY,
    "files_changed": ErrorClass.INTEGRITY,
    # modules
    "not_bindable": ErrorClass.INVALID,
    "outside_arena": ErrorClass.INVALID,
    "uncovered_tensor": ErrorClass.INVALID,
    "left_on_meta": ErrorClass.INVALID,
    "derived_changed": ErrorClass.INTEGRITY,
    "warmup_failed": ErrorClass.INVALID,
    "probe_drift": ErrorClass.INTEGRITY,
}


class Refusal(Exception):
    """`subject` was `found` where `expected` is required; nothing that serves was changed."""

    def __init__(self, kind: str, subject: str, expected: str, found: str, phase: str = "device") -> None:
        assert kind in REFUSALS, kind
        self.kind = kind
        self.phase = phase  # device | plan | fill | verify | bind | warm | probe | gate
        self.subject = subject
        self.expected = expected
        self.found = found
        super().__init__(f"{kind} ({phase}): {self.detail}")

    @property
    def error_class(self) -> ErrorClass:
        return REFUSALS[self.kind]

    @property
    def detail(self) -> str:
        return f"{self.subject}: expected {self.expected}, found {self.found}"
