"""What the processes of one agent say to each other: a closed tagged union of frozen values, msgpack on the wire.

Three kinds. A `Numbered` message is a call and gets exactly one `Reply` with its number; a `Push` is said unasked, on connecting and
whenever it changes. All processes of an agent run the same build, so tags may change between releases.
"""

from __future__ import annotations

import msgspec

from node_agent.failure import Failure

MAX_FRAME_BYTES = 64 << 20  # 16 million values of 4 bytes, or the block sums of a tensor of 256 GiB


class Message(msgspec.Struct, frozen=True, tag_field="t"):
    """Base of everything on the wire."""


class Numbered(Message, frozen=True):
    number: int


class Reply(Message, frozen=True):
    number: int


class Push(Message, frozen=True):
    pass


class Tensor(msgspec.Struct, frozen=True):
    """One named tensor of a request or an answer, row-major."""

    name: str
    datatype: str  # a name of the Open Inference Protocol
    shape: tuple[int, ...]
    data: bytes | tuple[str, ...]  # little-endian elements, or the texts of a BYTES tensor


class TensorSpec(msgspec.Struct, frozen=True):
    """What a model takes or gives; -1 stands for a dimension of the request."""

    name: str
    datatype: str
    shape: tuple[int, ...]


# --- front to worker


class Infer(Numbered, frozen=True, tag="infer"):
    deployment: str
    version: str  # "" takes the active one
    inputs: tuple[Tensor, ...]
    outputs: tuple[str, ...]  # empty: all


class Inferred(Reply, frozen=True, tag="inferred"):
    version: str  # the label that computed this answer, read under the gate
    checksum: str
    outputs: tuple[Tensor, ...]


class Fault(Reply, frozen=True, tag="fault"):
    """A call that failed. `status` is the HTTP status that the front answers with."""

    status: int
    code: str  # a code of errors.CODES, or one of the agent's own below
    detail: str
    failure: Failure = Failure()  # of a load that was refused


NOT_LOADED = "not_loaded"  # this worker has no module for the active slot yet; ask again soon
NOTHING_SERVES = "nothing_serves"  # no verified slot can be entered on this node, by no worker; it ends by a switch, not by waiting
REQUEST_CANCELLED = "request_cancelled"  # it used a slot that had to be rewritten for longer than the deployment's policy allows
VERSION_NOT_HELD = "version_not_held"  # no slot of this node holds the asked version, verified and warm
BAD_INPUT = "bad_input"  # the tensors do not fit the model

# --- worker to front and control


class SlotServed(msgspec.Struct, frozen=True):
    slot: int
    label: str
    checksum: str
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()


class Served(msgspec.Struct, frozen=True):
    """One deployment in one worker."""

    deployment: str
    slots: tuple[SlotServed, ...]  # verified, bound and warm, active or not
    active: int  # slot that answers, -1 when none does
    blocked: str = ""  # why no slot may be entered, whoever asks; "" also while only this worker has not loaded it yet
    is_loading: bool = False  # the worker began a moment ago: what it does not list it may hold soon
    failed: int = 0  # requests that the module failed at, since the worker began: perhaps its memory is damaged
    is_binding: bool = False  # the worker makes a module of a slot right now, of whichever deployment, and computes more slowly


class WorkerState(Push, frozen=True, tag="worker_state"):
    worker: int
    pid: int
    served: tuple[Served, ...]


# --- control to worker


class Load(Numbered, frozen=True, tag="load"):
    """Bind and warm what a slot holds, beside the one that serves."""

    deployment: str
    slot: int
    label: str
    checksum: str


class Loaded(Reply, frozen=True, tag="loaded"):
    derived: dict[str, str]  # digest of each tensor that the module holds outside the arena
    milliseconds: int


class Prove(Numbered, frozen=True, tag="prove"):
    """To the prober: try what a slot holds, before any worker does."""

    deployment: str
    slot: int
    label: str
    checksum: str


class Measured(msgspec.Struct, frozen=True):
    """One output of one probe. `value` is a relative error, a cosine, or a divergence; `holds` judges it against `limit`."""

    probe: str
    output: str
    measure: str
    value: float
    limit: float
    holds: bool
    note: str = ""


class Proved(Reply, frozen=True, tag="proved"):
    derived: dict[str, str]  # as of Loaded
    warm_ms: int  # of the first forward pass
    peak_bytes: int  # by which the process's own memory grew at most
    measured: tuple[Measured, ...]


class Release(Numbered, frozen=True, tag="release"):
    """Forget a slot that is about to be rewritten, -1 for the whole deployment. Answered when no request can touch it any more."""

    deployment: str
    slot: int


class Cancel(Numbered, frozen=True, tag="cancel"):
    """End the request that computes in this slot, with an answer that says so. A worker that has to end for it ends before the reply."""

    deployment: str
    slot: int


class Acknowledge(Numbered, frozen=True, tag="acknowledge"):
    """With which slot and version would you answer now? Asked through the same queue as requests."""

    deployment: str


class Answering(Reply, frozen=True, tag="answering"):
    slot: int
    label: str
    checksum: str


class Done(Reply, frozen=True, tag="done"):
    pass


class CheckDerived(Numbered, frozen=True, tag="check_derived"):
    """Digest again what the module of a slot holds outside it, tensor by tensor between requests."""

    deployment: str
    slot: int
    checksum: str
    ends: bool  # a worker in which a tensor changed computes nothing more with that module, and ends after its answer


class DerivedDamage(msgspec.Struct, frozen=True):
    """A tensor in a worker's own memory that changed since the module was bound."""

    tensor: str
    block: int  # the first of 64 KiB that differs
    expected: str  # both sums of that block as hex
    found: str


class DerivedChecked(Reply, frozen=True, tag="derived_checked"):
    damaged: tuple[DerivedDamage, ...]
    ends: bool  # the worker ends now


# --- control to front


class Hold(Numbered, frozen=True, tag="hold"):
    """Keep the requests of a deployment back; renews a hold that lasts. What workers compute for it now is asked again afterwards.

    It ends with the lease, with the connection, after a bound that no renewal moves, or when it is let go.
    """

    deployment: str
    lease_ms: int


class Held(Reply, frozen=True, tag="held"):
    in_flight: int  # requests of the deployment that workers have
    lease_ms: int  # for how long it holds, 0 when it does not any more


class LetGo(Numbered, frozen=True, tag="let_go"):
    deployment: str


# --- front to control; metrics to any


class GetStatus(Numbered, frozen=True, tag="get_status"):
    pass


class GetVector(Numbered, frozen=True, tag="get_vector"):
    """The vector of a deployment's active slot, computed now from its memory."""

    deployment: str
    entries: bool  # with the entry of every tensor
    blocks: str  # the block checks of this tensor instead, the only one that is read; "" for none
    published: bool = False  # with `blocks`: as they were published, from the version's file of block checks
    wait_s: float = 30.0  # after which nobody waits any more


class GetVectors(Numbered, frozen=True, tag="get_vectors"):
    """The roots of several deployments' active slots, in one answer."""

    deployments: tuple[str, ...]  # empty: all of the node
    max_age_ms: int | None  # a reading that began no longer ago will do; None: read now
    wait_s: float  # after which nobody waits any more


class GetDigests(Numbered, frozen=True, tag="get_digests"):
    """SHA-256 of tensors of a deployment's active slot, computed now from its memory, in order of their names."""

    deployment: str
    after: str  # name of the last tensor that is known already, "" for none
    limit_bytes: int  # to read for one answer; one tensor at least
    wait_s: float  # after which nobody waits any more


class GetEvidence(Numbered, frozen=True, tag="get_evidence"):
    """Which bytes of a deployment serve here, and what is known of them."""

    deployment: str


class GetPlan(Numbered, frozen=True, tag="get_plan"):
    """What the node would do next, and what that would cost, without doing it."""

    version: str = ""  # label: as if it were activated now


class SetCordon(Numbered, frozen=True, tag="set_cordon"):
    """Take the node out of readiness; it goes on serving and following. "" lifts it."""

    reason: str


class SetPin(Numbered, frozen=True, tag="set_pin"):
    """Go on serving what a deployment serves now, whatever is ordered. "" lifts it."""

    deployment: str
    reason: str


class Abort(Numbered, frozen=True, tag="abort"):
    """Fail the running rollout of a deployment on this node."""

    deployment: str
    reason: str


class Json(Reply, frozen=True, tag="json"):
    body: bytes


class GetMetrics(Numbered, frozen=True, tag="get_metrics"):
    pass


class GaugeSample(msgspec.Struct, frozen=True):
    """What is so in one process at this moment. Counts are not asked for: they stand in tallies."""

    metric: str  # as in metric_table
    labels: tuple[str, ...]  # values
    value: float


class Metrics(Reply, frozen=True, tag="metrics"):
    gauges: tuple[GaugeSample, ...]


_Any = (
    Infer | Inferred | Fault | WorkerState | Load | Loaded | Prove | Proved | Release | Cancel | Acknowledge | Answering | Done
    | CheckDerived | DerivedChecked | Hold | Held | LetGo | GetStatus | GetEvidence | GetVector | GetVectors | GetDigests | GetPlan
    | SetCordon | SetPin | Abort | Json | GetMetrics | Metrics
)  # fmt: skip
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Any)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Raises msgspec.MsgspecError for anything but a message."""
    return _decoder.decode(data)
