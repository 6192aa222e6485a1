"""The engines of this build by the name that a manifest gives them, and what each needs beside torch.

Importing this loads no library. A node that serves only modules of torch's own layers needs no transformers: it starts seconds sooner, and
each of its processes is smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from node_agent.refusal import Refusal

if TYPE_CHECKING:
    from node_agent.engine.port import Engine
    from node_agent.loading import Engines


class Known(NamedTuple):
    library: str  # the package that has to be installed for it
    extra: str  # of this distribution, that brings it
    load: Callable[[], Callable[[], Engine]]


def _hf() -> Callable[[], Engine]:
    from node_agent.engine.hf import HfEngine

    return HfEngine


def _torch_module() -> Callable[[], Engine]:
    from node_agent.engine.torch_module import TorchModuleEngine

    return TorchModuleEngine


KNOWN = {"hf": Known("transformers", "agent-hf", _hf), "torch_module": Known("torch", "agent", _torch_module)}


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """The engines of a node: those that are named, or all whose library is installed."""
    return tuple(names) or tuple(name for name in KNOWN if not _missing(name))


def fault(names: Sequence[str]) -> str:
    """Why a node cannot have these engines, "" when it can. Loads nothing."""
    for name in names:
        if name not in KNOWN:
            return f"engines: {name[:64]!r} is none of {', '.join(KNOWN)}"
        if _missing(name):
            return f"engines: {name} needs {_missing(name)}, which is not installed: pip install 'raftmeta[{KNOWN[name].extra}]'"
    if len(set(names)) != len(names):
        return f"engines: one of {', '.join(names)} stands there twice"
    return "" if chosen(names) else "no library that computes is installed: pip install 'raftmeta[agent]', or 'raftmeta[agent-hf]'"


def load(names: Sequence[str]) -> Engines:
    """Loads the libraries of the engines of a node: seconds of a processor, the first time."""
    return {name: KNOWN[name].load() for name in chosen(names)}


def require(engine: str, here: Collection[str], label: str, phase: str) -> None:
    """Raises Refusal not_bindable for a version that asks for an engine that is not here."""
    if engine not in here:
        raise Refusal("not_bindable", f"version {label}", f"an engine of {', '.join(here)} (`engines` in agent.toml)", engine, phase)


def _missing(name: str) -> str:
    """The package that an engine lacks here."""
    return next((library for library in ("torch", KNOWN[name].library) if find_spec(library) is None), "")
