"""Tries a staged version before any worker makes a module of it: binds, warms up, answers the version's probes. No request reaches it.

A process of its own at a lower priority: whatever the version does to it, from running out of memory to a crash inside a kernel, happens to
nobody who serves. The slot is let go after each, or its memory could not be given back.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from node_agent import journal, probe
from node_agent.device.arena import Arena
from node_agent.engine.port import BadInput, EngineFault, Instance
from node_agent.loading import LOAD_FAULTS, Loader, Wanted, failure_of, refused
from node_agent.memory import peak_growth
from node_agent.messages import Measured, Prove, Proved, Reply, Tensor
from node_agent.refusal import Refusal
from raftmeta.core.manifest import Manifest
from raftmeta.core.probes import Probe


@dataclass(frozen=True)
class ProbePlaces:
    store_dir: Path
    arena_dir: Path
    warm_limit_s: float  # for the first forward pass
    kernel: str  # what computes here, as probes record it
    threads: int


class Prober:
    def __init__(self, places: ProbePlaces, loader: Loader, clock: Callable[[], float] = time.monotonic) -> None:
        self._places = places
        self._loader = loader
        self._clock = clock

    def prove(self, call: Prove) -> Reply:
        """What the version did here, or why it may not serve."""
        try:
            return self._prove(call)
        except LOAD_FAULTS as cause:
            return refused(call, failure_of(cause, f"{call.deployment} slot {call.slot}"))

    def _prove(self, call: Prove) -> Reply:
        record = journal.read(self._places.store_dir)
        known = None if record is None else record.deployments.get(call.deployment)
        if known is None:
            raise Refusal("not_bindable", f"deployment {call.deployment}", "one in the node's record", "none", "bind")
        arena = Arena.open(self._places.arena_dir / known.arena)
        try:
            return self._try(arena, call)
        finally:
            gc.collect()  # the module's views keep the mapping
            with suppress(BufferError):
                arena.close()

    def _try(self, arena: Arena, call: Prove) -> Reply:
        with peak_growth() as peak:
            loaded = self._loader.load(arena, Wanted(call.deployment, call.slot, call.label, call.checksum))
            warm_ms = self._warm(loaded.instance, call)
            measured = [found for each in loaded.manifest.probes for found in self._answer(loaded.instance, loaded.manifest, each)]
            loaded.instance.check()
        self._judge(loaded.manifest, measured)
        return Proved(call.number, dict(loaded.instance.derived), warm_ms, peak(), tuple(measured))

    def _warm(self, instance: Instance, call: Prove) -> int:
        begin = self._clock()
        instance.warm()
        took_s = self._clock() - begin
        if took_s > self._places.warm_limit_s:
            expected, found = f"a first answer within {self._places.warm_limit_s:g} s", f"{took_s:.1f} s"
            raise Refusal("warmup_failed", f"{call.deployment} {call.label}", expected, found, "warm")
        return round(took_s * 1000)

    def _answer(self, instance: Instance, manifest: Manifest, asked: Probe) -> list[Measured]:
        inputs = [Tensor(item.name, item.datatype, item.shape, item.data) for item in asked.inputs]
        try:
            found = instance.infer(inputs, [item.name for item in asked.outputs])
        except BadInput as cause:
            raise Refusal("probe_drift", f"probe {asked.name!r}", "an answer", f"refused: {cause}", "probe") from cause
        except EngineFault as cause:
            raise Refusal("probe_drift", f"probe {asked.name!r}", "an answer", cause.detail, "probe") from cause
        return probe.measure(asked, found, sorted({tensor.dtype for tensor in manifest.tensors}))

    def _judge(self, manifest: Manifest, measured: list[Measured]) -> None:
        wrong = [found for found in measured if not found.holds]
        if not wrong:
            return
        first = wrong[0]
        made = next(each for each in manifest.probes if each.name == first.probe)
        sign = ">=" if first.measure == "cosine" else "<="
        expected = f"{first.measure} {sign} {first.limit:g} of what {made.kernel or 'an unnamed kernel'} with {made.threads} threads gave"
        found = f"{first.note or format(first.value, 'g')} on {self._places.kernel} with {self._places.threads} threads"
        more = f" and {len(wrong) - 1} more of {len(measured)} outputs" if len(wrong) > 1 else ""
        subject = f"probe {first.probe!r}, output {first.output!r}{more}"
        raise Refusal("probe_drift", subject, expected, found, "probe")
