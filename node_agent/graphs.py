"""When a captured graph of a module may answer instead of the module itself: only after it was seen to answer alike from these very bytes.

A graph is bound to addresses, so it outlives a switch to new bytes in the same layout, and is worth nothing in another one. After each
switch it replays the version's probes, and each answer has to be as near to the eager one as the probe says; until then, and whenever it is
not, the module answers itself. A layout whose graph failed once is not tried again while this process remembers it. Pure but for what it is
given: the runner computes, the reporter tells.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from node_agent import metric_table as table
from node_agent import probe as probes
from node_agent.messages import Tensor
from node_agent.metrics import Meter
from node_agent.runtime import log
from raftmeta.core.probes import Probe, ProbeTensor

MAX_LAYOUTS: Final = 64  # remembered as failed; one that was forgotten is compared anew
MAX_REASON: Final = 300  # characters


class GraphFault(Exception):
    """Capturing or replaying failed; the module itself may be sound."""


class Runner(Protocol):
    """One module in one slot."""

    def eager(self, inputs: Sequence[Tensor], outputs: Sequence[str]) -> Sequence[Tensor]: ...

    def replay(self, inputs: Sequence[Tensor], outputs: Sequence[str]) -> Sequence[Tensor]:
        """The same through the graph, which is captured if it is not there. Raises GraphFault."""


class Switched(NamedTuple):
    deployment: str
    layout_digest: str
    probes: Sequence[Probe]
    dtypes: Sequence[str]  # of the version's tensors


class GraphVerdict(NamedTuple):
    deployment: str
    layout_digest: str
    on: bool
    reason: str = ""  # why it is off


class Graphs:
    """Of one process; used by its computing thread."""

    def __init__(self, report: Callable[[GraphVerdict], None]) -> None:
        self._report = report
        self._on: dict[str, str] = {}  # deployment -> the layout whose graph was compared since its last switch
        self._failed: OrderedDict[str, str] = OrderedDict()  # layout -> why

    def may_replay(self, deployment: str, layout_digest: str) -> bool:
        return self._on.get(deployment) == layout_digest

    def switching(self, deployment: str) -> None:
        """Before the first request of other bytes: the module answers itself until the graph was compared."""
        self._on.pop(deployment, None)

    def switched(self, event: Switched, runner: Runner) -> GraphVerdict:
        """Compare, decide, tell. What the module itself raises is the caller's matter; the graph is off then."""
        self.switching(event.deployment)
        known = self._failed.get(event.layout_digest)
        reason = f"this layout's graph failed before: {known}" if known is not None else _difference(event, runner)
        if not reason:
            self._on[event.deployment] = event.layout_digest
        elif known is None and event.probes:  # a later version in this layout may bring probes
            self._failed[event.layout_digest] = reason
            while len(self._failed) > MAX_LAYOUTS:
                self._failed.popitem(last=False)
        verdict = GraphVerdict(event.deployment, event.layout_digest, not reason, reason[:MAX_REASON])
        self._report(verdict)
        return verdict


def reporter(meter: Meter) -> Callable[[GraphVerdict], None]:
    """A gauge per deployment, and a log line when a graph is off."""

    def report(verdict: GraphVerdict) -> None:
        meter.set(table.GRAPHS_ON, int(verdict.on), verdict.deployment)
        if not verdict.on:
            log.warning("graphs_off", deployment=verdict.deployment, layout=verdict.layout_digest, reason=verdict.reason)

    return report


def _difference(event: Switched, runner: Runner) -> str:
    """Why the graph may not answer, "" if it may."""
    if not event.probes:
        return "the version has no probe to compare its answers on"
    for asked in event.probes:
        inputs = [Tensor(item.name, item.datatype, item.shape, item.data) for item in asked.inputs]
        names = [item.name for item in asked.outputs]
        wanted = [ProbeTensor(item.name, item.datatype, item.shape, item.data) for item in runner.eager(inputs, names)]
        try:
            found = runner.replay(inputs, names)
        except GraphFault as fault:
            return f"probe {asked.name!r}: {fault}"
        for measured in probes.measure(msgspec.structs.replace(asked, outputs=tuple(wanted)), found, event.dtypes):
            if not measured.holds:
                far = measured.note or f"{measured.measure} {measured.value:g}, the limit is {measured.limit:g}"
                return f"probe {asked.name!r}, output {measured.output!r}: replay differs from eager by {far}"
    return ""
