from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from node_agent.binding import SlotViews
from node_agent.engine.port import BadInput, EngineFault
from node_agent.loading import Loader
from node_agent.messages import Fault, Prove, Proved, Tensor
from node_agent.plan import Order
from node_agent.prober import ProbePlaces, Prober
from node_agent.serving import Staging
from raftmeta.core.manifest import Manifest
from raftmeta.core.probes import Probe, ProbeTensor
from tests.support.agent_memory import NodeMemory
from tests.support.first_byte import FakeInstance
from tests.support.small_version import Version, make_version

PROBE = Probe("first-byte", "close", (ProbeTensor("x", "INT64", (1,), bytes(8)),), (ProbeTensor("y", "UINT8", (1,), b"1"),), threads=4)


class Scene:
    """A staged version whose module answers with the first byte of tensor `a`."""

    def __init__(self, root: Path, arena_dir: Path) -> None:
        self.memory = NodeMemory(root / "store", arena_dir)
        self.now = 0.0
        self.behave: Callable[[FakeInstance], None] = lambda instance: None
        self.version: Version = make_version(root / "v1", "1.0.0", {"a": b"1" * 100})
        self.memory.fetch(self.version)
        self.station = self.memory.station()
        self.station.make_room(self.version.manifest)
        self.station.stage(Staging(self.version.target, self.version.manifest, 1, Order(1, 1), "", 0))

    def load(self, version_dir: Path, views: SlotViews, unbound: Sequence[str]) -> FakeInstance:
        instance = FakeInstance(views)
        self.behave(instance)
        return instance

    def prove(self, *probes: Probe, slot: int = 1, checksum: str = "") -> object:
        """As if the version had been published with these."""
        store = self.memory.store
        stored = store.manifest

        def manifest(name: str) -> Manifest | None:
            found = stored(name)
            return None if found is None else msgspec.structs.replace(found, probes=probes)

        store.manifest = manifest  # type: ignore[method-assign]
        places = ProbePlaces(self.memory.root, self.memory.arena_dir, 5.0, "here", 1)
        target = self.version.target
        call = Prove(7, "search", slot, target.label, checksum or target.checksum)
        return Prober(places, Loader(store, {"fake": lambda: self}), lambda: self.now).prove(call)


@pytest.fixture
def scene(tmp_path: Path, shm: Path) -> Scene:
    return Scene(tmp_path, shm)


def refused(reply: object) -> Fault:
    assert isinstance(reply, Fault), reply
    assert reply.number == 7 and reply.failure.kind == reply.code
    return reply


def test_what_answers_as_the_publisher_saw_is_proved_with_its_costs(scene: Scene) -> None:
    reply = scene.prove(PROBE)
    assert isinstance(reply, Proved)
    assert reply.derived == {"table": "d" * 64}
    assert [(found.probe, found.output, found.holds, found.value) for found in reply.measured] == [("first-byte", "y", True, 0.0)]
    assert reply.peak_bytes >= 0


def test_a_version_without_probes_is_bound_and_warmed(scene: Scene) -> None:
    assert isinstance(scene.prove(), Proved)


def test_drift_names_probe_output_limit_and_both_kernels(scene: Scene) -> None:
    other = msgspec.structs.replace(PROBE, name="second", outputs=(ProbeTensor("y", "UINT8", (1,), b"9"),), kernel="there")
    found = refused(scene.prove(PROBE, other)).failure
    assert (found.kind, found.phase) == ("probe_drift", "probe")
    assert found.subject == "probe 'second', output 'y'" and found.detail.startswith("probe_drift: probe 'second', output 'y': expected ")
    found = refused(scene.prove(other, msgspec.structs.replace(other, name="third"))).failure
    assert found.subject == "probe 'second', output 'y' and 1 more of 2 outputs"
    assert "there with 4 threads" in found.expected and "here with 1 threads" in found.found


@pytest.mark.parametrize("cause", [BadInput("takes z"), EngineFault("engine_failed", "NaN")])
def test_a_probe_that_gets_no_answer_is_drift(scene: Scene, cause: Exception) -> None:
    def behave(instance: FakeInstance) -> None:
        def infer(inputs: Sequence[Tensor], outputs: Sequence[str]) -> tuple[Tensor, ...]:
            raise cause

        instance.infer = infer  # type: ignore[method-assign]

    scene.behave = behave
    assert refused(scene.prove(PROBE)).code == "probe_drift"


def test_a_first_answer_beyond_its_limit_is_refused_with_the_numbers(scene: Scene) -> None:
    def behave(instance: FakeInstance) -> None:
        def warm() -> None:
            scene.now += 5.1

        instance.warm = warm  # type: ignore[method-assign]

    scene.behave = behave
    found = refused(scene.prove()).failure
    assert (found.kind, found.expected, found.found) == ("warmup_failed", "a first answer within 5 s", "5.1 s")


def test_a_module_that_does_not_warm_up_or_changes_while_it_answers_is_refused(scene: Scene) -> None:
    def fails(instance: FakeInstance) -> None:
        def warm() -> None:
            raise EngineFault("warmup_failed", "a value that is not finite")

        instance.warm = warm  # type: ignore[method-assign]

    scene.behave = fails
    assert refused(scene.prove()).failure.phase == "warm"
    scene.behave = lambda instance: setattr(instance, "moved", True)
    assert refused(scene.prove()).code == "derived_changed"


def test_memory_that_does_not_suffice_is_a_refusal_and_not_the_end(scene: Scene) -> None:
    def behave(instance: FakeInstance) -> None:
        raise MemoryError

    scene.behave = behave
    assert refused(scene.prove()).code == "no_memory"


def test_only_a_verified_slot_of_the_asked_version_is_tried(scene: Scene) -> None:
    assert refused(scene.prove(slot=0)).code == "slot_not_verified"
    assert refused(scene.prove(checksum="0" * 64)).code == "slot_not_verified"
