"""Why a node could not do what a rollout asked of it: one of nine classes, and where, what was expected and what was found. Pure.

The class is what an attestation carries as its code and what metrics count: it says who has to do something. The kind beside it names the
very refusal, and may grow in number; the classes are a closed set.
"""

from __future__ import annotations

import errno
from enum import StrEnum

import msgspec

from node_agent.refusal import REFUSALS
from raftmeta.core.errors import CODES, ErrorClass

MAX_TEXT = 600  # characters of each part


class FailureClass(StrEnum):
    INTEGRITY_MISMATCH = "integrity_mismatch"  # bytes are not what was published: page a person
    RESOURCE_EXHAUSTED = "resource_exhausted"  # memory, disk or quota: free something, or give the node more
    SOURCE_UNAVAILABLE = "source_unavailable"  # no source has the bytes right now
    INCOMPATIBLE_LAYOUT = "incompatible_layout"  # tensors, dtypes, config or class do not fit together, or not this policy
    WARMUP_FAILED = "warmup_failed"  # the module does not run, or too slowly
    PROBE_DRIFT = "probe_drift"  # it runs, and answers other than the publisher said
    TIMEOUT = "timeout"  # somebody did not let go, or did not answer, in time
    FENCED = "fenced"  # a newer order was obeyed already, or an operator said no
    INTERNAL = "internal"  # of this program or machine


_KINDS: dict[str, FailureClass] = {
    "no_headroom": FailureClass.RESOURCE_EXHAUSTED,
    "no_memory": FailureClass.RESOURCE_EXHAUSTED,
    "no_second_slot": FailureClass.RESOURCE_EXHAUSTED,
    "slot_busy": FailureClass.TIMEOUT,
    "workers_lag": FailureClass.TIMEOUT,
    "not_quiet": FailureClass.TIMEOUT,
    "engine_unavailable": FailureClass.TIMEOUT,
    "device_late": FailureClass.TIMEOUT,
    "bad_layout": FailureClass.INCOMPATIBLE_LAYOUT,
    "source_failed": FailureClass.SOURCE_UNAVAILABLE,
    "source_unavailable": FailureClass.SOURCE_UNAVAILABLE,
    "integrity_mismatch": FailureClass.INTEGRITY_MISMATCH,
    "vector_mismatch": FailureClass.INTEGRITY_MISMATCH,
    "files_changed": FailureClass.INTEGRITY_MISMATCH,
    "derived_changed": FailureClass.INTEGRITY_MISMATCH,
    "not_bindable": FailureClass.INCOMPATIBLE_LAYOUT,
    "outside_arena": FailureClass.INCOMPATIBLE_LAYOUT,
    "uncovered_tensor": FailureClass.INCOMPATIBLE_LAYOUT,
    "left_on_meta": FailureClass.INCOMPATIBLE_LAYOUT,
    "engine_failed": FailureClass.WARMUP_FAILED,
    "warmup_failed": FailureClass.WARMUP_FAILED,
    "probe_drift": FailureClass.PROBE_DRIFT,
    **dict.fromkeys(("fenced", "pinned", "aborted"), FailureClass.FENCED),
    **dict.fromkeys(
        ("barrier_unavailable", "foreign_arena", "arena_in_use", "foreign_control_block", "control_in_use", "worker_alive"),
        FailureClass.INTERNAL,
    ),
    **dict.fromkeys(("no_device", "device_failed", "keeper_unavailable", "keeper_in_use", "memory_differs"), FailureClass.INTERNAL),
    **dict.fromkeys(("slot_active", "slot_not_dirty", "slot_not_verified", "nothing_serves", "internal"), FailureClass.INTERNAL),
}
_CODES: dict[ErrorClass, FailureClass] = {  # errors of the control plane and of the store
    ErrorClass.UNAVAILABLE: FailureClass.SOURCE_UNAVAILABLE,
    ErrorClass.CAPACITY: FailureClass.RESOURCE_EXHAUSTED,
    ErrorClass.INTEGRITY: FailureClass.INTEGRITY_MISMATCH,
}
_ERRNO_KINDS = {errno.ENOSPC: "disk_full", errno.EDQUOT: "disk_full", errno.ENOMEM: "no_memory"}
assert set(REFUSALS) <= set(_KINDS), set(REFUSALS) - set(_KINDS)


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stopped a step. Empty: nothing did."""

    kind: str = ""  # of the refusal; a code of its own
    phase: str = ""  # of the work: fetch | plan | fill | verify | bind | warm | probe | switch | …
    subject: str = ""  # of which thing
    expected: str = ""
    found: str = ""

    def __bool__(self) -> bool:
        return bool(self.kind)

    @property
    def failure_class(self) -> FailureClass:
        return class_of(self.kind)

    @property
    def detail(self) -> str:
        """One sentence for people."""
        is_named = self.subject.split(" ", 1)[0] == self.phase  # as in "probe 'texts'": the phase says nothing beside it
        where = f"{self.kind} in {self.phase}" if self.phase and not is_named else self.kind
        what = f"{self.subject}: expected {self.expected}, found {self.found}" if self.expected else self.subject
        return f"{where}: {what}"


def make(kind: str, phase: str, subject: str, expected: str = "", found: str = "") -> Failure:
    """With each part cut to what fits into an attestation."""
    return Failure(kind, phase, subject[:MAX_TEXT], expected[:MAX_TEXT], found[:MAX_TEXT])


def kind_of(cause: OSError, otherwise: str) -> str:
    """Of an error of the system: what is full is named as such."""
    return _ERRNO_KINDS.get(cause.errno or 0, otherwise)


def class_of(kind: str) -> FailureClass:
    found = _KINDS.get(kind)
    if found is None and kind in CODES:
        found = _CODES.get(CODES[kind].error_class)
    return FailureClass.INTERNAL if found is None else found
