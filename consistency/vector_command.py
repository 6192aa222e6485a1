"""`raftmeta vector FILE|DIR`: the vector of weights on disk, entry by entry, with their root.

The same root as in a manifest means the same weights. Nothing is asked of anybody and, without --write-blocks, nothing is written.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len

from consistency import block_placing, block_sidecar, vector
from consistency.artifact_files import Listing
from consistency.vector_files import TensorChecks, read, weights_of
from consistency.vector_threads import MAX_THREADS, threaded
from raftmeta.cli import output
from raftmeta.cli.exits import Exit, Unusable, UsageFault
from raftmeta.cli.program import JsonOptions, command
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import FileEntry

_LEAST_DIGITS = 12  # of a root that is expected: as many as `status` and `check` show
_ROOT = re.compile(rf"[0-9a-f]{{{_LEAST_DIGITS},64}}\Z")
_WEIGHTS_HINT = "FILE is a *.safetensors, DIR holds some as `raftmeta publish` takes them"
_WRITE_HINT = "write them where they can be written, or publish with --no-blocks"
_SHORT = 16  # hexadecimal digits of an entry on a terminal that is too narrow for it
_LEAST_NAME = 20  # of a name there
_GAP = "  "


@dataclass(frozen=True, kw_only=True)
class VectorOptions(JsonOptions):
    target: Annotated[Path, typer.Argument(metavar="FILE|DIR", help="A safetensors file, or a directory as `raftmeta publish` takes it.")]
    expect: Annotated[str | None, typer.Option("--expect", metavar="ROOT", help="Exit 1 unless the root is this one, or begins so.")] = None
    blocks: Annotated[str | None, typer.Option("--blocks", metavar="TENSOR", help="Print the checks of its 64 KiB blocks.")] = None
    write_blocks: Annotated[bool, typer.Option("--write-blocks", help="Write the block checks into DIR, as publish does.")] = False
    threads: Annotated[int, typer.Option("--threads", metavar="N", min=1, max=MAX_THREADS, help="Computing threads.")] = 1


def _vector(options: VectorOptions) -> int:
    """Print the weight-consistency vector of weights: an entry for each tensor, and the root, which a version's manifest has, too.

    Exit code 1 when --expect names another root, 3 for files that cannot be published. docs/wcv.md has the definition.
    """
    _check(options)
    with _unusable(_WEIGHTS_HINT):
        listing = weights_of(options.target)
        with threaded(options.threads) as using, output.Progress(quiet=options.json or not sys.stderr.isatty()) as shown:
            tensors = read(listing, using, _Told(listing, shown), options.blocks)
    if options.blocks is not None:
        return _print_blocks(options, tensors[0])
    return _print(options, tensors, _write(listing, tensors) if options.write_blocks else None)


def _check(options: VectorOptions) -> None:
    """Before gigabytes are read."""
    if options.expect is not None and not _ROOT.match(options.expect.lower()):
        raise UsageFault(
            f"--expect is {options.expect[:80]!r}, expected {_LEAST_DIGITS} to 64 hexadecimal digits",
            "a manifest's vector_root, for instance",
        )
    if options.blocks is not None and (options.expect is not None or options.write_blocks):
        raise UsageFault("--blocks reads one tensor; --expect and --write-blocks need all", "leave one of them away")
    if options.write_blocks and not options.target.is_dir():
        raise UsageFault(f"--write-blocks asks for a directory, {options.target} is none", "name the directory that will be published")


@contextmanager
def _unusable(hint: str) -> Iterator[None]:
    """What the files are refused for is no answer: its exit code is not that of another root."""
    try:
        yield
    except RaftmetaError as cause:
        raise Unusable(cause, hint) from cause


class _Told:
    """Counts what was read."""

    def __init__(self, listing: Listing, shown: output.Progress) -> None:
        self._total, self._done, self._shown = output.size(listing.total_bytes), 0, shown

    def __call__(self, count: int) -> None:
        self._done += count
        self._shown.say(f"read {output.size(self._done)} of {self._total}")


def _write(listing: Listing, tensors: Sequence[TensorChecks]) -> FileEntry:
    with _unusable(_WRITE_HINT):
        return block_placing.write(listing.root, block_sidecar.pack({tensor.name: tensor.blocks for tensor in tensors}))


def _print(options: VectorOptions, tensors: Sequence[TensorChecks], written: FileEntry | None) -> int:
    root = vector.root({tensor.name: tensor.entry for tensor in tensors})
    expected = options.expect.lower() if options.expect else None
    is_other = expected is not None and not root.startswith(expected)
    if options.json:
        output.print_json(
            {
                "root": root,
                "expected": expected,
                "size_bytes": sum(tensor.size_bytes for tensor in tensors),
                "tensors": [_described(tensor) for tensor in tensors],
                "blocks": None if written is None else {"name": written.name, "size_bytes": written.size_bytes, "sha256": written.sha256},
            }
        )
    else:
        rows = [(tensor.name, tensor.dtype, _shape(tensor), str(tensor.size_bytes), tensor.entry) for tensor in tensors]
        _print_table(("TENSOR", "DTYPE", "SHAPE", "BYTES", "ENTRY"), rows)
        lines = [] if written is None else [f"blocks    {written.name}, {output.size(written.size_bytes)}"]
        lines += [f"expected  {expected}"] if is_other else []
        sys.stdout.write("\n".join([*lines, f"root      {root}{'' if expected is None or is_other else '  as expected'}"]) + "\n")
    return Exit.NO if is_other else Exit.OK


def _print_blocks(options: VectorOptions, tensor: TensorChecks) -> int:
    checks = [(f"{a:016x}", f"{b:016x}") for a, b in tensor.blocks.tolist()]
    if options.json:
        output.print_json({**_described(tensor), "blocks": [{"a": a, "b": b} for a, b in checks]})
    else:
        rows = [(str(number), str(number * vector.BLOCK_BYTES), a, b) for number, (a, b) in enumerate(checks)]
        _print_table(("BLOCK", "FROM BYTE", "A", "B"), rows)
        sys.stdout.write(f"entry     {tensor.entry}\n")
    return Exit.OK


def _described(tensor: TensorChecks) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "file": tensor.file,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "size_bytes": tensor.size_bytes,
        "entry": tensor.entry,
    }


def _shape(tensor: TensorChecks) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns; there may be 90,000 rows, too many for a table that is laid out as a whole."""
    shown = [list(heads), *([output.printable(cell) for cell in row] for row in rows)]
    widths = [max(cell_len(row[column]) for row in shown) for column in range(len(heads))]
    if sys.stdout.isatty():
        widths = fitted(widths, output.console().width)
    for row in shown:
        cells = [_cell(head, cell, width) for head, cell, width in zip(heads, row, widths, strict=True)]
        sys.stdout.write(_GAP.join(cells).rstrip() + "\n")


def fitted(widths: Sequence[int], limit: int) -> list[int]:
    """Column widths for a line of `limit`: the last column, digits, gives way first, then the first one, names, as far as both may."""
    made = list(widths)
    for column, least in ((-1, _SHORT), (0, _LEAST_NAME)):
        excess = sum(made) + len(_GAP) * (len(made) - 1) - limit
        if excess > 0:
            made[column] = min(made[column], least if column else max(least, made[column] - excess))
    return made


def _cell(head: str, text: str, width: int) -> str:
    """Of this width; of what is too long a name loses its middle, other text its end, and an ellipsis stands there."""
    if cell_len(text) > width:
        tail = 2 * (width - 1) // 3
        text = f"{text[: width - 1 - tail]}…{text[-tail:]}" if head == "TENSOR" else text[: width - 1] + "…"
    pad = " " * (width - cell_len(text))
    return pad + text if head in ("BYTES", "BLOCK", "FROM BYTE") else text + pad


main = command("vector", VectorOptions, _vector)
