"""An engine for tests: its module answers with the first byte of tensor `a`, read from the slot at that moment. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from node_agent.binding import SlotViews
from node_agent.engine.port import BadInput, EngineFault
from node_agent.messages import DerivedDamage, Tensor, TensorSpec
from node_agent.refusal import Refusal


class FakeInstance:
    """Answers with the first byte of tensor `a`, read from the slot at that moment."""

    inputs = (TensorSpec("x", "INT64", (-1,)),)
    outputs = (TensorSpec("y", "UINT8", (1,)),)
    derived: Mapping[str, str] = {"table": "d" * 64}

    def __init__(self, views: SlotViews) -> None:
        self._views = views
        self.during: Callable[[], None] = lambda: None
        self.moved = False
        self.warmed = 0
        self.damage: dict[str, DerivedDamage] = {}

    def check_derived(self, name: str) -> DerivedDamage | None:
        return self.damage.get(name)

    def infer(self, inputs: Sequence[Tensor], outputs: Sequence[str]) -> tuple[Tensor, ...]:
        if inputs and inputs[0].name != "x":
            raise BadInput("takes x")
        self.during()
        value = bytes(self._views["a"][:1].numpy())
        return (Tensor("y", "UINT8", (1,), value),)

    def warm(self) -> None:
        self.warmed += 1
        if bytes(self._views["a"][:1].numpy()) == b"!":
            raise EngineFault("warmup_failed", "a value that is not finite")

    def check(self) -> None:
        if self.moved:
            raise Refusal("derived_changed", "derived tensors", "the bytes at binding", "others")


class FakeEngine:
    made: list[FakeInstance] = []

    def load(self, version_dir: Path, views: SlotViews, unbound: Sequence[str]) -> FakeInstance:
        assert (version_dir / "config.json").is_file()
        instance = FakeInstance(views)
        self.made.append(instance)
        return instance
