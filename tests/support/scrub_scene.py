"""One deployment that serves from real shared memory, with a worker in this process and what the scrub does in a test's hands. Needs torch.

Its module answers with the first and the last byte of the first block of tensor `a`, read one after the other, so that an answer tells
whether it saw the block as it was, as it is damaged, or half written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from consistency.vector import BLOCK_BYTES
from node_agent.active_memory import ActiveMemory, Watched
from node_agent.binding import SlotViews
from node_agent.host import Host
from node_agent.loading import Loader
from node_agent.messages import Fault, Infer, Inferred, Load, Loaded, Reply, Tensor
from node_agent.plan import Order
from node_agent.serving import Staging
from node_agent.station import Station
from tests.support.agent_memory import NodeMemory
from tests.support.first_byte import FakeInstance
from tests.support.small_version import Version, make_version

A = b"g" * (2 * BLOCK_BYTES) + b"end"
GOOD, BAD = b"gg", b"bb"


class EndsInstance(FakeInstance):
    def infer(self, inputs: Sequence[Tensor], outputs: Sequence[str]) -> tuple[Tensor, ...]:
        memory = self._views["a"]
        first = bytes(memory[:1].numpy())
        self.during()
        return (Tensor("y", "UINT8", (2,), first + bytes(memory[BLOCK_BYTES - 1 : BLOCK_BYTES].numpy())),)


class EndsEngine:
    made: list[EndsInstance] = []

    def load(self, version_dir: Path, views: SlotViews, unbound: Sequence[str]) -> EndsInstance:
        instance = EndsInstance(views)
        self.made.append(instance)
        return instance


class ScrubScene:
    def __init__(self, root: Path, arena_dir: Path) -> None:
        self.memory = NodeMemory(root / "store", arena_dir)
        small = self.others()
        self.versions: dict[int, Version] = {
            1: make_version(root / "v1", "1.0.0", {"a": A, **small}),
            2: make_version(root / "v2", "2.0.0", {"a": b"2" * len(A), **small}),
        }
        for version in self.versions.values():
            self.memory.fetch(version)
        self.station: Station = self.memory.station()
        EndsEngine.made.clear()
        self.host = Host(0, (self.memory.root, arena_dir), Loader(self.memory.store, {"fake": EndsEngine}))
        self.station.make_room(self.versions[1].manifest)
        self.now_ns = 1_000
        self.active = ActiveMemory(self.station, lambda: self.now_ns)
        self.bring_up(1, 0)
        self.switch(1, 0)

    @staticmethod
    def others() -> dict[str, bytes]:
        """The tensors beside `a`: enough for two runs of a pass."""
        return {f"s{number}": bytes([number]) * 300 for number in range(5)} | {"big": bytes(20 * BLOCK_BYTES)}

    def bring_up(self, number: int, slot: int) -> None:
        version = self.versions[number]
        self.station.stage(Staging(version.target, version.manifest, slot, Order(1, number), "", 0))
        target = version.target
        reply = self.host.load(Load(1, "search", slot, target.label, target.checksum))
        assert isinstance(reply, Loaded), reply
        self.station.note_warm(slot, "", {})

    def switch(self, number: int, slot: int) -> None:
        self.station.switch(self.versions[number].target, slot)

    @property
    def watched(self) -> Watched:
        found = self.active.watched()
        assert found is not None
        return found

    def damage(self, *at: int, tensor: str = "a", value: int = ord("b")) -> None:
        """Write this value at places of a tensor, by default the first and the last byte of the first block of `a`."""
        watched = self.watched
        arena = self.station.arena
        assert arena is not None
        memory = arena._slot(watched.slot)
        for place in at or (0, BLOCK_BYTES - 1):
            memory[watched.places[tensor].offset + place] = value

    def fix(self, tensor: str, block: int) -> Callable[[memoryview], None]:
        data = A if tensor == "a" else bytes([int(tensor[1:])]) * 300

        def read_into(into: memoryview) -> None:
            into[:] = data[block * BLOCK_BYTES : block * BLOCK_BYTES + len(into)]

        return read_into

    def infer(self, version: str = "") -> Reply:
        return self.host.infer(Infer(1, "search", version, (Tensor("x", "INT64", (1,), bytes(8)),), ()))

    def answer(self, version: str = "") -> bytes | str:
        """The two bytes, or the code of the fault."""
        return said(self.infer(version))

    def compute(self, version: str = "") -> tuple[threading.Event, Callable[[], bytes | str]]:
        """Begin a request that stays between its two reads until the event is set; then call what is given for its answer."""
        began, go_on = threading.Event(), threading.Event()
        replies: list[Reply] = []

        def during() -> None:
            began.set()
            assert go_on.wait(30)

        for instance in EndsEngine.made:
            instance.during = during
        thread = threading.Thread(target=lambda: replies.append(self.infer(version)))
        thread.start()
        assert began.wait(30)
        for instance in EndsEngine.made:
            instance.during = lambda: None

        def ended() -> bytes | str:
            go_on.set()
            thread.join(30)
            return said(replies[0])

        return go_on, ended

    def close(self) -> None:
        EndsEngine.made.clear()
        self.host.close()
        self.station.close()


def said(reply: Reply) -> bytes | str:
    if isinstance(reply, Fault):
        return reply.code
    assert isinstance(reply, Inferred)
    data = reply.outputs[0].data
    assert isinstance(data, bytes)
    return data
