"""What the agent needs of a serving engine: a module bound to a slot, that answers tensors with tensors.

An engine is chosen by the manifest's `engine`. It loads from a directory that holds the version's files without weights, and from views of
the slot's memory; it copies no weights. An instance may be called by several threads; it answers one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from node_agent.messages import DerivedDamage, Tensor, TensorSpec

if TYPE_CHECKING:
    from node_agent.binding import SlotViews


class BadInput(Exception):
    """The tensors do not fit the model; the message says which and why."""


class EngineFault(Exception):
    """The module failed or gave what no answer can be, NaN for instance. `kind` is the failure class of an attestation."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class Instance(Protocol):
    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def derived(self) -> Mapping[str, str]:
        """SHA-256 of each tensor that the module holds outside the slot."""

    def check_derived(self, name: str) -> DerivedDamage | None:
        """Digest one tensor of `derived` again: how it changed since loading, None when it did not."""

    def infer(self, inputs: Sequence[Tensor], outputs: Sequence[str]) -> tuple[Tensor, ...]:
        """Raises BadInput or EngineFault."""

    def warm(self) -> None:
        """Run what a request runs. Raises EngineFault."""

    def check(self) -> None:
        """Nothing moved since loading. Raises Refusal derived_changed."""


class Engine(Protocol):
    def load(self, version_dir: Path, views: SlotViews, unbound: Sequence[str]) -> Instance:
        """Raises Refusal or EngineFault; nothing that serves is touched."""
