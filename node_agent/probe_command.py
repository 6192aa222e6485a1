"""`raftmeta probe`: runs a directory of weights once and writes down what it answered, for `raftmeta publish --probes`.

The module is bound by the agent's own engine over the directory's tensors, so what is written down is what a node with the same kernel will
answer. Nothing is published, and nothing in the directory is changed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from consistency import described
from consistency.artifact_files import list_files
from raftmeta.cli import output
from raftmeta.cli.exits import Exit, UsageFault
from raftmeta.cli.program import JsonOptions, command
from raftmeta.core import probes
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.probes import Probe, ProbeTensor

if TYPE_CHECKING:
    from node_agent.binding import SlotViews
    from node_agent.engine.port import Instance
    from node_agent.probe_inputs import Asked

ROWS = 8  # that are drawn
SEED = 1
KINDS = {"hf": "texts", "torch_module": "a described module"}  # what is asked, by engine
TAKEN = {
    "texts": ("--text", "--name", "--limit"),
    "a described module": ("--rows", "--seed", "--name", "--limit"),
    "--inputs": (),
}  # options that have a meaning


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(JsonOptions):
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What will be published: *.safetensors and what belongs to them.")]
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where to write; without it to standard output.")] = None
    text: Annotated[list[str] | None, typer.Option("--text", metavar="TEXT", help="An input; repeat. Without any, four of our own.")] = None
    inputs: Annotated[
        Path | None,
        typer.Option("--inputs", metavar="FILE", help="Requests instead, one a line, each a probe; as `raftmeta live` takes them."),
    ] = None
    rows: Annotated[int | None, typer.Option("--rows", metavar="N", min=1, max=256, help=f"Rows drawn for a described module; {ROWS}.")] = (
        None
    )
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", min=0, help=f"Of what is drawn; {SEED}.")] = None
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Of the probe, for who reads of its failure.")] = None
    limit: Annotated[
        float | None,
        typer.Option("--limit", metavar="N", min=0, max=1, help="Least cosine of a text, relative tolerance of numbers; 0: the default."),
    ] = None
    threads: Annotated[int, typer.Option("--threads", metavar="N", min=1, max=256, help="Computing threads; recorded.")] = 1


def _probe(options: ProbeOptions) -> int:
    """Run a directory of weights and write its answers down as probes, which nodes have to match before they serve the version.

    A Hugging Face encoder is asked texts, a module that its version describes numbers, and either what a file holds: one JSON object a
    line, {"inputs": [...]} as the inference protocol has it, with "name", "measure" (close, cosine, logits) and "limit" if they are wanted.
    """
    if not options.directory.is_dir():
        raise UsageFault(f"{options.directory} is no directory", "name the directory that will be published")
    asked = _asked(options)
    if options.out is not None:
        _check_out(options.out)
    list_files(options.directory)
    made = answers(options.directory, asked, options.threads)
    faults = list(probes.faults(made))
    if faults:
        raise UsageFault(f"these probes cannot be published: {faults[0]}", "fewer or smaller inputs, and names without blanks")
    data = msgspec.json.format(msgspec.json.encode({"probes": made}), indent=2) + b"\n"
    if options.out is None:
        sys.stdout.write(data.decode())
        return Exit.OK
    try:
        options.out.write_bytes(data)
    except OSError as cause:
        raise _unwritable(options.out, cause.strerror or str(cause)) from cause
    rows, kernel = sum(each.rows for each in asked), made[0].kernel
    if options.json:
        output.print_json({"file": str(options.out), "probes": len(made), "rows": rows, "kernel": kernel, "threads": options.threads})
        return Exit.OK
    count = f"{len(made)} probe{'s' if len(made) > 1 else ''} with {rows} row{'s' if rows > 1 else ''}"
    threads = f"{options.threads} thread{'s' if options.threads > 1 else ''}"
    output.console().print(
        f"{count}, {kernel}, {threads}: {output.size(len(data))} in {options.out}\n"
        f"next         raftmeta publish {options.directory} --probes {options.out} …",
        markup=False,
    )
    return Exit.OK


def _asked(options: ProbeOptions) -> list[Asked]:
    """Raises UsageFault for options that do not belong together, and RaftmetaError for a file that is none, before anything heavy."""
    from node_agent import probe_inputs

    kind = "--inputs" if options.inputs is not None else KINDS[described.engine_of(options.directory)]
    given = {
        "--text": options.text, "--rows": options.rows, "--seed": options.seed, "--name": options.name, "--limit": options.limit,
    }  # fmt: skip
    for option, value in given.items():
        if value is not None and option not in TAKEN[kind]:
            takes = ", ".join(TAKEN[kind]) or "all of it stands in the file"
            raise UsageFault(f"{option} does not belong to {kind}", f"with {kind}: {takes}")
    limit = options.limit or 0.0
    if options.inputs is not None:
        from consistency.two_sides import questions_of

        return probe_inputs.of_questions(questions_of(options.inputs))
    if kind == KINDS["hf"]:
        return [probe_inputs.of_texts(options.text or probe_inputs.TEXTS, options.name or "texts", limit)]
    rows, seed = options.rows or ROWS, SEED if options.seed is None else options.seed
    return [probe_inputs.drawn(described.read(options.directory), rows, seed, options.name or "drawn", limit)]


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


def answers(directory: Path, asked: Sequence[Asked], threads: int = 1) -> list[Probe]:
    """Raises RaftmetaError bad_manifest when the directory holds nothing that an engine can run, bad_field for what it does not take."""
    import torch

    from node_agent.engine.port import BadInput, EngineFault
    from node_agent.proving import kernel
    from node_agent.refusal import Refusal

    torch.set_num_threads(threads)
    made: list[Probe] = []
    try:
        instance = _load(directory)
        for each in asked:
            found = instance.infer(each.inputs, each.outputs)
            inputs = tuple(ProbeTensor(item.name, item.datatype, item.shape, item.data) for item in each.inputs)
            outputs = tuple(ProbeTensor(item.name, item.datatype, item.shape, item.data) for item in found)
            made.append(Probe(each.name, each.measure, inputs, outputs, each.limit, each.padding, kernel(), threads))
    except BadInput as cause:
        raise RaftmetaError("bad_field", f"probe {asked[len(made)].name!r} cannot be asked: {cause}") from cause
    except (Refusal, EngineFault) as cause:
        raise RaftmetaError("bad_manifest", f"{directory} cannot be run: {cause}") from cause
    return made


def _load(directory: Path) -> Instance:
    from node_agent.engine import known

    engine, views = described.engine_of(directory), _views(directory)
    unbound = sorted(views) if engine == "hf" else ()  # which tensors stay unbound is for `publish` to say
    return known.load([engine])[engine]().load(directory, views, unbound)


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
