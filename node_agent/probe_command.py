"""`raftmeta probe`: runs a directory of weights once and writes down what it answered, for `raftmeta publish --probes`.

The module is bound by the agent's own engine over the directory's tensors, so what is written down is what a node with the same kernel will
answer. Nothing is published, and nothing in the directory is changed.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from consistency.artifact_files import list_files
from raftmeta.cli import output
from raftmeta.cli.exits import Exit, UsageFault
from raftmeta.cli.program import JsonOptions, command
from raftmeta.core import module_description, probes
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.probes import Probe, ProbeTensor

if TYPE_CHECKING:
    from node_agent.binding import SlotViews
    from node_agent.engine.port import Instance

TEXTS = (
    "The committee approved the credit line on Tuesday.",
    "Ein kurzer Satz in einer anderen Sprache.",
    "42",
    "A longer passage tells whether padding, positions and attention masks are treated the same: it goes on for some time, with commas.",
)


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(JsonOptions):
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Holds *.safetensors, config.json, the tokenizer.")]
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where to write; without it to standard output.")] = None
    text: Annotated[list[str] | None, typer.Option("--text", metavar="TEXT", help="An input; repeat. Without any, four of our own.")] = None
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Of the probe, for who reads of its failure.")] = "texts"
    limit: Annotated[float, typer.Option("--limit", metavar="COSINE", min=0, max=1, help="Least cosine of every row; 0: 0.999.")] = 0.0
    threads: Annotated[int, typer.Option("--threads", metavar="N", min=1, max=256, help="Computing threads; recorded.")] = 1


def _probe(options: ProbeOptions) -> int:
    """Run a directory of weights and write its answers down as probes, which nodes have to match before they serve the version."""
    if not options.directory.is_dir():
        raise UsageFault(f"{options.directory} is no directory", "name the directory that will be published")
    if (options.directory / module_description.FILE).is_file():
        raise UsageFault(f"{options.directory} describes a module that takes no text", "publish it without probes, or with your own")
    if options.out is not None:
        _check_out(options.out)
    list_files(options.directory)
    made = answers(options.directory, tuple(options.text or TEXTS), options)
    faults = list(probes.faults([made]))
    if faults:
        raise UsageFault(f"these probes cannot be published: {faults[0]}", "fewer or shorter texts")
    data = msgspec.json.format(msgspec.json.encode({"probes": [made]}), indent=2) + b"\n"
    if options.out is None:
        sys.stdout.write(data.decode())
        return Exit.OK
    try:
        options.out.write_bytes(data)
    except OSError as cause:
        raise _unwritable(options.out, cause.strerror or str(cause)) from cause
    rows, width = made.outputs[0].shape
    if options.json:
        output.print_json({"file": str(options.out), "texts": rows, "width": width, "kernel": made.kernel, "threads": made.threads})
        return Exit.OK
    output.console().print(
        f"{rows} texts, embeddings of {width}, {made.kernel}, {made.threads} threads: {output.size(len(data))} in {options.out}\n"
        f"next         raftmeta publish {options.directory} --probes {options.out} …",
        markup=False,
    )
    return Exit.OK


def _check_out(path: Path) -> None:
    """Before the model runs, which takes half a minute and more."""
    if path.is_dir():
        raise _unwritable(path, "it is a directory")
    if not path.parent.is_dir():
        raise _unwritable(path, f"{path.parent} is no directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise _unwritable(path, "permission denied")


def _unwritable(path: Path, why: str) -> UsageFault:
    return UsageFault(f"--out {path} cannot be written: {why}", "name a file in a directory that is there, for example: --out probes.json")


def answers(directory: Path, texts: tuple[str, ...], options: ProbeOptions) -> Probe:
    """Raises RaftmetaError bad_manifest when the directory holds nothing that the engine can run."""
    import torch

    from node_agent.engine.port import BadInput, EngineFault
    from node_agent.messages import Tensor
    from node_agent.proving import kernel
    from node_agent.refusal import Refusal

    torch.set_num_threads(options.threads)
    asked = Tensor("text", "BYTES", (len(texts),), texts)
    try:
        (found,) = _load(directory).infer([asked], ["embedding"])
    except (Refusal, EngineFault, BadInput) as cause:
        raise RaftmetaError("bad_manifest", f"{directory} cannot be run: {cause}") from cause
    assert isinstance(found.data, bytes)
    return Probe(
        name=options.name,
        measure="cosine",
        inputs=(ProbeTensor("text", "BYTES", (len(texts),), texts),),
        outputs=(ProbeTensor(found.name, found.datatype, found.shape, found.data),),
        limit=options.limit,
        padding="longest",
        kernel=kernel(),
        threads=options.threads,
    )


def _load(directory: Path) -> Instance:
    from node_agent.engine.hf import HfEngine

    views = _views(directory)
    return HfEngine().load(directory, views, sorted(views))  # which tensors stay unbound is for `publish` to say


def _views(directory: Path) -> SlotViews:
    """The directory's tensors in memory of this process, laid out as in a slot."""
    from consistency.artifact_files import WEIGHTS_SUFFIX, open_inside
    from consistency.artifact_reader import read_header
    from node_agent import layout as layouts
    from node_agent.binding import SlotViews
    from raftmeta.core.manifest import TensorEntry

    listing = list_files(directory)
    tensors: list[TensorEntry] = []
    for file in listing.files:
        if not file.name.endswith(WEIGHTS_SUFFIX):
            continue
        with open_inside(listing.root, file) as stream:
            _, header = read_header(file, stream)
        tensors += [TensorEntry(item.name, item.dtype, item.shape, file.name, item.begin, item.end, "", "") for item in header.tensors]
    layout = layouts.plan(tensors)
    memory = memoryview(bytearray(max(1, layout.total_bytes)))
    sources, files = {tensor.name: tensor for tensor in tensors}, {file.name: file for file in listing.files}
    for place in layout.placements:
        with open_inside(listing.root, files[sources[place.name].file]) as weights:
            weights.seek(sources[place.name].begin)
            _read_all(weights, memory[place.offset : place.end])
    return SlotViews(memory.toreadonly(), layout)


def _read_all(file: FileIO, into: memoryview) -> None:
    done = 0
    while done < len(into):
        count = file.readinto(into[done:])
        if not count:
            raise RaftmetaError("bad_manifest", "the file became shorter while it was read")
        done += count


main = command("probe", ProbeOptions, _probe)
