from __future__ import annotations

import asyncio
import io
from collections.abc import Callable

import pytest

from raftmeta.cli.demo import screen
from raftmeta.cli.demo.screen import PlainScreen, StepLine


class Enough(Exception):
    pass


def test_a_step_that_goes_on_is_told_of_and_a_short_one_only_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    shown = PlainScreen(file)
    steps, picture = shown.picture.steps, shown.picture

    def begin(text: str) -> None:
        for line in steps:
            if line.state == "running":
                line.state = "done"
                shown.ended(line)
        steps.append(StepLine(text))

    def prepare() -> None:
        picture.phase = "preparing"

    def switch() -> None:
        picture.phase = ""
        begin("second")

    between: list[Callable[[], None]] = [lambda: begin("first"), prepare, switch, lambda: begin("third"), lambda: None]

    async def until_the_next_look(seconds: float) -> None:
        assert seconds == screen.GOES_ON_S
        if not between:
            raise Enough
        between.pop(0)()

    monkeypatch.setattr(asyncio, "sleep", until_the_next_look)
    with pytest.raises(Enough):
        asyncio.run(shown.animate())
    told = [line.split("s  ", 1)[1] for line in file.getvalue().splitlines()]
    assert told == ["...    first (preparing)", "ok     first (0.0 s)", "ok     second (0.0 s)", "...    third"]
