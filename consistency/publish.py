"""`raftmeta publish DIR`: read a directory of weights once, build its manifest, and publish it as a version of a model.

Publishing never serves anything. The same bytes under the same label are a success that changes nothing; other bytes are refused. Where
agents fetch the files from is part of the manifest but of no digest: without --source it is this directory, which suits one machine or a
shared file system.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

from consistency import block_placing, unbound_hf
from consistency.artifact import FindUnbound, Hooks, listed, read_artifact
from consistency.artifact_files import Skipped
from consistency.artifact_reader import Progress
from consistency.block_placing import Placed
from consistency.described import engine_of
from raftmeta import strict_json
from raftmeta.cli import output
from raftmeta.cli.exits import Exit, Unusable, UsageFault
from raftmeta.cli.program import MemberOptions, command
from raftmeta.client import STALE, Reply
from raftmeta.core import probes as core_probes
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import LABEL, NAME, Manifest, source_fault
from raftmeta.core.probes import Probe

MAX_PROBES_FILE = 4 << 20  # bytes; what it may hold is bounded by core.probes
MAX_NEXT = 5  # deployments whose next command is written out
_PLAIN_STEP = 10  # percent, at least, between two plain lines
_PLAIN_S = 1.0  # the same in seconds


class _ProbesFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    probes: tuple[Probe, ...]


@dataclass(frozen=True, kw_only=True)
class PublishOptions(MemberOptions):
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Holds *.safetensors, config.json, the tokenizer.")]
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="Lower-case name; the first publish makes it.")]
    label: Annotated[str, typer.Option("--label", metavar="LABEL", help="The version, for instance 1.4.0. It keeps its bytes.")]
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--source", metavar="URL", help="Where agents find DIR: file:///dir/, http(s)://host/dir/ or s3://bucket/prefix/; repeat."
        ),
    ] = None
    unbound: Annotated[
        list[str] | None, typer.Option("--unbound", metavar="NAME", help="A tensor that no module takes; repeat. Otherwise found out.")
    ] = None
    all_bound: Annotated[bool, typer.Option("--all-bound", help="Every tensor is taken; do not find out.")] = False
    probes: Annotated[
        Path | None, typer.Option("--probes", metavar="FILE", help="Answers that nodes have to match, as `raftmeta probe` writes them.")
    ] = None
    blocks: Annotated[
        bool | None,
        typer.Option("--blocks/--no-blocks", help="Publish block checks, a file beside the weights. Default: if the sources will have it."),
    ] = None
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine", metavar="NAME", help="The agent's engine that serves it; else torch_module where DIR describes a module, or hf."
        ),
    ] = None


def _publish(options: PublishOptions) -> int:
    """Publish a directory of weights as a version of a model. Nothing serves it until it is activated.

    Every byte is read once, hashed, and checked; a directory that contradicts itself or changes meanwhile is refused and nothing is
    published. Needs the agent-hf extra only to find out which tensors stay unbound; name them with --unbound where it is not installed.
    """
    _check_names(options)
    probes = () if options.probes is None else read_probes(options.probes)
    engine = options.engine or engine_of(options.directory)
    _check_directory(options.directory, engine)
    asyncio.run(_reach(options))
    with _Shown(quiet=options.json) as shown:
        hooks = Hooks(progress=shown.progress, skipped=shown.skipped, find_unbound=_finder(engine, shown.say))
        artifact = read_artifact(
            options.directory,
            sources=options.source or [f"{options.directory.resolve().as_uri()}/"],
            engine=engine,
            unbound=[] if options.all_bound else options.unbound,
            hooks=hooks,
        )
        placed = block_placing.place(options.directory, artifact, options.blocks)
        manifest = msgspec.structs.replace(placed.manifest, probes=probes)
        shown.say(f"publishing {options.model}/{options.label}")
        reply, serving = asyncio.run(_send(options, manifest))
    result = _result(reply, manifest, placed)
    if options.json:
        skipped = [{"name": item.name, "reason": item.reason} for item in shown.left_out]
        output.print_json({**result, "skipped": skipped})
    else:
        told = [*_told(options, result, manifest), *_next(options, serving)]
        output.console().print("\n".join(told) + "\n", markup=False, end="", soft_wrap=True)
    return Exit.OK


def read_probes(path: Path) -> tuple[Probe, ...]:
    """Raises UsageFault for a file that holds none, or none that can be published."""
    hint = "raftmeta probe DIR --out FILE writes them"
    try:
        found = strict_json.load_object(path.read_bytes(), MAX_PROBES_FILE)
        read = msgspec.convert(found, _ProbesFile).probes
    except (OSError, RaftmetaError, msgspec.ValidationError) as cause:
        raise UsageFault(f"--probes {path} cannot be read: {cause}", hint) from cause
    fault = next(core_probes.faults(read), "" if read else "it holds no probe")
    if fault:
        raise UsageFault(f"--probes {path}: {fault}", hint)
    return read


async def _reach(options: PublishOptions) -> None:
    """Before gigabytes are read: that a member answers and knows who is asking."""
    async with options.connect() as client:
        try:
            await client.cluster(STALE)
        except RaftmetaError as error:
            if error.code != "forbidden":  # whoever may publish need not be allowed to look
                raise


async def _send(options: PublishOptions, manifest: Manifest) -> tuple[Reply, list[str] | None]:
    """What the member answered, and which deployments are of this model; None where that is not told."""
    async with options.connect() as client:
        with suppress(RaftmetaError):
            await client.cluster(STALE)  # opens the connection, so that commit_ms is the time of the quorum's decision
        begin = time.perf_counter()
        reply = await client.publish(options.model, options.label, manifest)
        reply["commit_ms"] = round((time.perf_counter() - begin) * 1e3, 3)
        if options.json:
            return reply, None
        try:
            page = await client.list_deployments(read=STALE)
        except RaftmetaError:
            return reply, None
        names = [str(item["name"]) for item in page["items"] if item["model"] == options.model]
        return reply, names if names or page["next"] is None else None


def _check_names(options: PublishOptions) -> None:
    """Before gigabytes are read."""
    if not NAME.match(options.model):
        raise UsageFault(
            f"--model is {options.model!r}, expected lower-case letters, digits, '.', '_' or '-'", "for example: --model minilm"
        )
    if not LABEL.match(options.label):
        raise UsageFault(f"--label is {options.label!r}, expected letters, digits, '.', '_', '+' or '-'", "for example: --label 1.4.0")
    if options.unbound and options.all_bound:
        raise UsageFault("--unbound and --all-bound contradict each other", "give one of them, or neither to find out")

    for source in options.source or ():
        fault = source_fault(source)
        if fault:
            raise UsageFault(
                f"--source {source[:200]!r} {fault}",
                "where nodes find DIR: file:///dir/, http(s)://host/dir/ or s3://bucket/prefix/, "
                "for example: --source https://store.example/minilm/",
            )


def _check_directory(directory: Path, engine: str) -> None:
    """That it is one of a model, before a member is asked: what is wrong with it is to be seen here."""
    try:
        listed(directory, engine)
    except RaftmetaError as error:
        if error.code != "bad_field":
            raise
        example = "raftmeta publish ./minilm --model minilm --label 1.0.0"
        raise Unusable(error, f"name the directory that `save_pretrained` wrote, for example: {example}") from error


def _finder(engine: str, say: Callable[[str], None]) -> FindUnbound | None:
    """For the engine "hf", where its libraries are installed; a described module takes every tensor."""
    if engine == "torch_module":
        return lambda root, names: []
    if engine != "hf" or not unbound_hf.available():
        return None

    def find(root: Path, names: Sequence[str]) -> list[str]:
        say("finding out which tensors the module takes")
        return unbound_hf.find_unbound(root, names)

    return find


def _result(reply: Reply, manifest: Manifest, placed: Placed) -> dict[str, Any]:
    created = reply.status == 201
    unbound, sources = list(manifest.unbound), list(manifest.sources)
    return {**reply, "created": created, "unbound": unbound, "sources": sources, "blocks": _blocks(placed, created)}


def _blocks(placed: Placed, created: bool) -> dict[str, Any]:
    if not created:
        return {"file": None, "note": "as they were published first"}
    file = placed.file
    named = None if file is None else {"name": file.name, "size_bytes": file.size_bytes, "sha256": file.sha256}
    return {"file": named, "note": placed.note}


def _told(options: PublishOptions, result: dict[str, Any], manifest: Manifest) -> list[str]:
    what = "published" if result["created"] else "already published with the same bytes"
    unbound = ", ".join(output.printable(name) for name in result["unbound"]) or "none"
    file, note = result["blocks"]["file"], output.printable(result["blocks"]["note"])
    blocks = f"{file['name']}, {output.size(file['size_bytes'])}; {note}" if file else note
    return [
        f"{options.model}/{options.label} {what} as number {result['number']}",
        f"checksum     {result['checksum']}",
        f"vector root  {result['vector_root']}",
        f"size         {output.size(result['size_bytes'])} in {result['file_count']} files, {result['tensor_count']} tensors",
        f"unbound      {unbound}",
        f"blocks       {blocks}",
        f"probes       {', '.join(probe.name for probe in manifest.probes) or 'none; `raftmeta probe` makes them'}",
    ]


def _next(options: PublishOptions, serving: list[str] | None) -> list[str]:
    """What makes the version serve. `serving`: the deployments of its model, None: unknown."""
    if serving == []:
        sides = "--primary ZONE:NODE --standby ZONE:NODE"
        return [
            f"next         raftmeta deploy NAME --model {options.model} {sides}",
            f"             raftmeta activate NAME {options.label}",
        ]
    return [f"next         raftmeta activate {name} {options.label}" for name in (serving or ["DEPLOYMENT"])[:MAX_NEXT]]


class _Shown:
    """A bar on a terminal, now and then a line elsewhere, nothing with --json. Use as a context manager."""

    def __init__(self, quiet: bool) -> None:
        self.left_out: list[Skipped] = []
        self._quiet = quiet
        self._console = Console(stderr=True, highlight=False)
        self._bar: RichProgress | None = None
        self._task = TaskID(0)
        self._told_percent = 0
        self._begin = self._told_at = time.monotonic()

    def __enter__(self) -> _Shown:
        if not self._quiet and self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = RichProgress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("reading", total=None)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def progress(self, step: Progress) -> None:
        if self._bar:
            self._bar.update(self._task, completed=step.done_bytes, total=step.total_bytes)
            return
        percent, now = 100 * step.done_bytes // max(1, step.total_bytes), time.monotonic()
        due = percent >= self._told_percent + _PLAIN_STEP and now >= self._told_at + _PLAIN_S
        if due or step.done_bytes == step.total_bytes:
            self._told_percent, self._told_at = percent, now
            done, total = output.size(step.done_bytes), output.size(step.total_bytes)
            self.say(f"read {done} of {total} ({percent} %) in {now - self._begin:.1f} s")

    def skipped(self, item: Skipped) -> None:
        self.left_out.append(item)
        self.say(f"left out: {output.printable(item.name)} ({item.reason})")

    def say(self, text: str) -> None:
        if self._quiet:
            return
        if self._bar:
            self._bar.console.print(text, markup=False)
        else:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()


main = command("publish", PublishOptions, _publish)
