"""Every metric of a node: name, kind, labels, unit and meaning. Pure.

Names are promises: a golden file and docs/metrics.md hold them. Units are the base ones and stand in the name. A version is never a label:
versions come and go without bound. Deployments, workers and statuses are few, and phases and classes of failures are closed sets.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

PREFIX = "raftmeta_agent_"

REQUEST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
STEP_S = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
PAUSE_S = (0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.0025, 0.005, 0.01, 0.1)  # some 50 µs is usual

# Of a failure. What a node does in the order of a change; `other` for whatever a later build may say.
PHASES = ("fetch", "plan", "device", "fill", "verify", "bind", "warm", "probe", "gate", "switch", "attest", "other")
STEPS = ("fetch", "stage", "verify", "probe", "warm", "await_quiet", "switch", "await_workers")


class Kind(StrEnum):
    COUNTER = "counter"  # its samples end in _total
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Spec(NamedTuple):
    name: str  # without the prefix
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram, without infinity

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

REQUESTS = Spec("requests", _C, "Inference requests by HTTP status", ("deployment", "status"))
REQUEST_SECONDS = Spec("request_seconds", _H, "Inference requests from first byte to answer", ("deployment",), REQUEST_S)
DENIED = Spec("denied_requests", _C, "Requests of callers who are not known (401) or may not (403), by action", ("action", "status"))
REPLAYS = Spec("replays", _C, "Requests that were given to a second worker because the first was lost")
QUEUED = Spec("queued_requests", _G, "Requests that wait for a worker")
GRAPHS_ON = Spec("graphs_on", _G, "Whether a captured graph answers, as it was compared after the last switch", ("deployment",))
HOLD_SECONDS = Spec("hold_seconds", _H, "Requests of a deployment kept back while its memory is mended", ("deployment",), REQUEST_S)
IN_FLIGHT = Spec("in_flight_requests", _G, "Requests that a worker has", ("worker",))
PROCESS_UP = Spec("process_up", _G, "Whether a process of the tree answers", ("role", "index"))
READY = Spec("ready", _G, "Whether the node serves everything that is committed for it")
PRIVATE_BYTES = Spec("private_bytes", _G, "Anonymous memory of all processes of the agent together, without arenas")
ARENA_BYTES = Spec("arena_bytes", _G, "Memory of the arena that all processes share, counted once", ("deployment",))
SERIES_LOST = Spec("series_lost", _C, "Counts that found no room because a process counts too many different things", ("role", "index"))

WORKER_REQUESTS = Spec("worker_requests", _C, "Requests by outcome in the worker", ("worker", "deployment", "outcome"))
COMPUTE_SECONDS = Spec("compute_seconds", _H, "Time in the module and tokenizer", ("worker", "deployment"), REQUEST_S)
WORKER_BYTES = Spec("worker_private_bytes", _G, "Anonymous memory of the process, without the arena", ("worker",))

STEP_SECONDS = Spec("step_seconds", _H, "Steps of a change that were done, by step", ("deployment", "step"), STEP_S)
PAUSE_SECONDS = Spec("switch_pause_seconds", _H, "What a request can wait at a switch: the store and the barrier", ("deployment",), PAUSE_S)
SWITCH_SECONDS = Spec("switch_seconds", _H, "From the switch order seen to every worker answering", ("deployment",), STEP_S)
FETCHED = Spec("fetched_bytes", _C, "From sources into the store", ("deployment",))
READ = Spec("read_bytes", _C, "From the store into slots", ("deployment",))
FROM_ACTIVE = Spec("from_active_bytes", _C, "From the active slot into the other one", ("deployment",))
KEPT = Spec("kept_bytes", _C, "In the slot already when a version was prepared in it", ("deployment",))
FAILURES = Spec("failures", _C, "Steps that failed, each try, by class and phase", ("deployment", "class", "phase"))
SCRUB_BYTES = Spec("scrub_bytes", _C, "Memory that serves, read again in the background", ("deployment",))
SCRUB_PASSES = Spec("scrub_passes", _C, "Times that all of the memory that serves was read again", ("deployment",))
SCRUB_FINDINGS = Spec(
    "scrub_findings", _C, "Differences found, in memory, in derived tensors, or transient: right when read again", ("deployment", "class")
)
SCRUB_REPAIRS = Spec(
    "scrub_repairs", _C, "What was done about damage: repaired, restaged, or replaced (a worker)", ("deployment", "outcome")
)
VERIFIED_AGE = Spec("verified_age_seconds", _G, "Since every byte of what serves was found right, -1 unknown", ("deployment",))
DAMAGED = Spec("deployment_damaged", _G, "Whether damage was found in what serves and is not mended yet", ("deployment",))
REACHABLE = Spec("control_plane_reachable", _G, "Whether linearizable reads of the control plane are answered")
SILENT_SECONDS = Spec("control_plane_silent_seconds", _G, "Since the control plane answered last")
CORDONED = Spec("cordoned", _G, "Whether an operator took the node out of readiness")
STORE_BYTES = Spec("store_bytes", _G, "All blobs of this node's store")
VERIFIED = Spec("slots_verified", _G, "Slots that hold a verified version", ("deployment",))
DEPLOYMENT_READY = Spec("deployment_ready", _G, "Whether the committed version serves in every worker", ("deployment",))
LAG_SECONDS = Spec("switch_lag_seconds", _G, "From the last switch order seen to every worker answering, -1 unknown", ("deployment",))
PINNED = Spec("deployment_pinned", _G, "Whether an operator keeps the deployment on the version that it serves", ("deployment",))
TROUBLE = Spec("deployment_trouble", _G, "Whether a step of the deployment fails", ("deployment",))

METRICS: tuple[Spec, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Spec))
BY_NAME = {spec.name: spec for spec in METRICS}
assert len(BY_NAME) == len(METRICS)
