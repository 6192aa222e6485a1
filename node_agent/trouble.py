"""What a step that failed means for its rollout: the failure that is attested, and whether another try may help. Pure."""

from __future__ import annotations

from typing import NamedTuple

from node_agent import failure
from node_agent.crew import WorkersLag
from node_agent.failure import Failure
from node_agent.fetch import BlobsRotten, FetchFailed
from node_agent.ipc import CallFailed
from node_agent.plan import Attest, AwaitQuiet, AwaitWorkers, Decline, Fetch, Obey, StageInto, Step, SwitchTo, Verify, Warm
from node_agent.refusal import Refusal
from raftmeta.core.errors import ErrorClass, RaftmetaError

STEP_FAULTS = (Refusal, FetchFailed, BlobsRotten, RaftmetaError, CallFailed, WorkersLag, MemoryError, OSError)


class Trouble(NamedTuple):
    failure: Failure
    passing: bool  # another try may help


def trouble_of(cause: Exception, phase: str) -> Trouble:
    """The failure that an attestation would carry, and whether another try may help."""
    match cause:
        case Refusal():
            made = failure.make(cause.kind, cause.phase, cause.subject, cause.expected, cause.found)
            return Trouble(made, cause.kind in ("slot_busy", "source_failed", "engine_unavailable"))
        case FetchFailed():
            return Trouble(failure.make(cause.code, phase, cause.detail), False)  # the fetch had its own tries
        case CallFailed():
            made = cause.fault.failure or failure.make(cause.fault.code, phase, cause.fault.detail)
            return Trouble(made, cause.fault.code == "files_changed")  # the next try mends them
        case RaftmetaError():
            return Trouble(failure.make(cause.code, phase, cause.detail), cause.info.error_class is ErrorClass.UNAVAILABLE)
        case BlobsRotten():
            return Trouble(failure.make("integrity_mismatch", phase, str(cause)), True)
        case WorkersLag():
            return Trouble(failure.make("workers_lag", phase, str(cause)), True)
        case MemoryError():
            return Trouble(failure.make("no_memory", phase, str(cause) or "out of memory"), False)
        case OSError():
            return Trouble(failure.make(failure.kind_of(cause, "internal"), phase, f"{type(cause).__name__}: {cause}"), True)
        case _:
            raise AssertionError(f"no step fault: {cause!r}")


def phase_of(step: Step) -> str:
    """What a step does, for who reads of its failure."""
    match step:
        case Fetch():
            return "fetch"
        case StageInto():
            return "fill"
        case Verify():
            return "verify"
        case Warm():
            return "warm"
        case SwitchTo() | AwaitWorkers() | Obey():
            return "switch"
        case Decline():
            return "plan"
        case AwaitQuiet():
            return "gate"
        case Attest():
            return "attest"
