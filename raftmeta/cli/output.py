"""How commands print: one JSON value with `--json`, otherwise aligned columns that read the same on a terminal and in a file.

Progress goes to standard error, results to standard output, so a pipe gets results only. On a terminal progress is one line that is
rewritten; elsewhere it is plain lines.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from raftmeta.cli.escapes import json_text, printable

if TYPE_CHECKING:  # rich takes a tenth of a second to import, which nobody should pay who is shown no table
    from rich.console import Console
    from rich.status import Status
    from rich.table import Table
    from rich.text import Text

__all__ = ["Progress", "clock", "console", "json_text", "print_json", "printable", "short", "size", "styled", "table"]

_FILE_WIDTH = 240  # columns are never folded where no terminal limits them

STYLES = {
    "active": "green",
    "ok": "green",
    "done": "green",
    "leader": "green",
    "consistent": "green",
    "failed": "red",
    "diverged": "red",
    "missing": "red",
    "silent": "red",
    "current": "green",
    "restarted": "yellow",
    "unproven": "yellow",
    "unreachable": "red",
    "incomplete": "yellow",
    "preparing": "yellow",
    "syncing": "yellow",
    "committing": "yellow",
}


def print_json(value: object) -> None:
    sys.stdout.write(json_text(value, indent=2 if sys.stdout.isatty() else None) + "\n")


def console() -> Console:
    """For results. Colours and folding only on a terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _FILE_WIDTH, highlight=False, soft_wrap=False)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """Columns without frames; known words get their colour, empty cells a dash."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*(_cell(value) for value in row))
    return grid


def styled(word: str) -> Text:
    from rich.text import Text

    return Text(word, style=STYLES.get(word.split(" ")[0], ""))


def short(digest: str) -> str:
    return digest[:12]


def size(size_bytes: int) -> str:
    """Decimal units, as disks and networks count."""
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def clock(unix_ms: int) -> str:
    """UTC to the second; a dash for never."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(unix_ms / 1000)) if unix_ms > 0 else "-"


def _cell(value: object) -> Text:
    from rich.text import Text

    if isinstance(value, Text):
        return value
    text = "" if value is None else str(value)
    return styled(text) if text else Text("-", style="dim")


class Progress:
    """What is going on, told once per change."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._status: Status | None = None
        self._last = ""

    def __enter__(self) -> Progress:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console

            shown = Console(stderr=True, highlight=False)
            if shown.is_terminal:  # the environment may say that it is none
                self._status = shown.status("")
                self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._status:
            self._status.stop()

    def say(self, text: str) -> None:
        """Show where it stands; repeated texts are not, and whether anybody can be shown anything is no matter of the work."""
        text = printable(text)
        if self._quiet or text == self._last:
            return
        self._last = text
        if self._status:
            from rich.text import Text

            self._status.update(Text(text))
        else:
            with contextlib.suppress(OSError):
                sys.stderr.write(text + "\n")
                sys.stderr.flush()
