"""How the demo tells its story: a live screen on a terminal, one plain line per event elsewhere.

Both say the same in the same order, so a log of a CI run reads like the screen. The live part only reads what the story has put into
`Picture`; it decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from raftmeta.cli.demo.claims import Claim
from raftmeta.cli.output import printable, styled

REFRESH_S = 0.125
GOES_ON_S = 10.0  # between two lines of a step that goes on, where nothing is drawn


@dataclass
class ZoneRow:
    """What is known of one zone at this moment."""

    zone: str
    member: str = ""
    role: str = "starting"
    revision: int = 0
    node: str = ""
    side: str = ""
    serves: str = ""
    rate: float = 0.0  # answers per second
    p99_ms: float = 0.0
    lost: int = 0


@dataclass
class StepLine:
    text: str
    figure: str = ""
    seconds: float = 0.0
    state: str = "running"  # running | done | failed


@dataclass
class Picture:
    """Everything the screen shows."""

    zones: list[ZoneRow] = field(default_factory=list)
    steps: list[StepLine] = field(default_factory=list)
    phase: str = ""  # of the rollout that runs


class StepHandle:
    """Given to the story inside a step: what it found out."""

    def __init__(self, line: StepLine) -> None:
        self._line = line

    def figure(self, text: str) -> None:
        self._line.figure = printable(text)


class Screen(Protocol):
    picture: Picture

    def __enter__(self) -> Screen: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...
    async def animate(self) -> None: ...
    def ended(self, line: StepLine) -> None: ...


class PlainScreen:
    """A line when a step ends, and now and then while it goes on, for files and pipes."""

    def __init__(self, file: IO[str]) -> None:
        self.picture = Picture()
        self._file = file
        self._begin_s = time.monotonic()

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, *_: object) -> None: ...

    async def animate(self) -> None:
        """For ever: a step that was running the last time too is one that somebody waits for."""
        before: StepLine | None = None
        while True:
            await asyncio.sleep(GOES_ON_S)
            running = next((line for line in self.picture.steps if line.state == "running"), None)
            if running is not None and running is before:
                phase = f" ({self.picture.phase})" if self.picture.phase else ""
                self._write(f"{self._elapsed()}  {'...':<6} {running.text}{phase}")
            before = running

    def ended(self, line: StepLine) -> None:
        mark = "ok" if line.state == "done" else "FAILED"
        figure = f": {line.figure}" if line.figure else ""
        self._write(f"{self._elapsed()}  {mark:<6} {line.text}{figure} ({line.seconds:.1f} s)")

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._begin_s:6.1f} s"

    def _write(self, text: str) -> None:
        self._file.write(printable(text) + "\n")
        self._file.flush()


class LiveScreen:
    """Finished steps above, the running one and the zones below, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self.picture = Picture()
        self._console = console
        self._live = Live(get_renderable=self._render, console=console, auto_refresh=False, transient=True)
        self._spinner = Spinner("dots", style="cyan")

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    async def animate(self) -> None:
        """Redraw for ever. In the story's own thread: a second one would print between its lines."""
        while True:
            self._live.refresh()
            await asyncio.sleep(REFRESH_S)

    def ended(self, line: StepLine) -> None:
        self._live.refresh()
        self._console.print(step_row(line))

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = []
        for line in self.picture.steps:
            if line.state == "running":
                row = Table.grid(padding=(0, 1))
                phase = f"  {self.picture.phase}" if self.picture.phase else ""
                row.add_row(self._spinner, Text(line.text) + Text(phase, style="yellow") + Text("  " + line.figure, style="dim"))
                parts.append(row)
        parts += [Text(), zone_table(self.picture.zones)]
        return Group(*parts)


def step_row(line: StepLine) -> Table:
    mark = Text("✓", style="green") if line.state == "done" else Text("✗", style="red")
    figure = Text(f"  {line.figure}" if line.figure else "", style="cyan")
    return _marked(mark, Text(line.text) + figure + Text(f"  {line.seconds:.1f} s", style="dim"))


def _marked(mark: Text, text: Text) -> Table:
    """A long text goes on under itself, not under its mark."""
    row = Table.grid(padding=(0, 1))
    row.add_column(no_wrap=True)
    row.add_column(overflow="fold")
    row.add_row(mark, text)
    return row


def zone_table(zones: list[ZoneRow]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("ZONE", "MEMBER", "ROLE", "REVISION", "NODE", "SIDE", "SERVES", "REQ/S", "P99 MS", "LOST"):
        table.add_column(column, justify="right" if column in ("REVISION", "REQ/S", "P99 MS", "LOST") else "left")
    for row in zones:
        served = ("",) * 6
        if row.node:
            rate, p99 = (f"{row.rate:.1f}" if row.rate else "-"), (f"{row.p99_ms:.0f}" if row.p99_ms else "-")
            served = (row.node, row.side, row.serves or "-", rate, p99, str(row.lost))
        revision = str(row.revision) if row.revision else "-"
        table.add_row(row.zone, row.member, styled(row.role), revision, *served)
    return table


@contextmanager
def step(screen: Screen, text: str) -> Iterator[StepHandle]:
    """One step of the story, timed, shown as it runs and as it ended."""
    line = StepLine(text)
    begin_s = time.monotonic()
    screen.picture.steps.append(line)
    try:
        yield StepHandle(line)
        line.state = "done"
    except BaseException:
        line.state = "failed"
        raise
    finally:
        line.seconds = time.monotonic() - begin_s
        screen.picture.phase = ""
        screen.ended(line)


def print_claims(console: Console, claims: list[Claim]) -> None:
    """One line per claim with its figure."""
    console.print()
    for claim in claims:
        mark = Text("held  ", style="green") if claim.held else Text("FAILED", style="bold red")
        text = Text(claim.claim) + Text(f": {claim.figure}", style="cyan")
        console.print(_marked(mark, text) if console.is_terminal else mark + Text(" ") + text, soft_wrap=not console.is_terminal)


def choose(console: Console) -> Screen:
    return LiveScreen(console) if console.is_terminal else PlainScreen(console.file)
