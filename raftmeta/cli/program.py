"""From a frozen options type and a function to a command: typer parses, the function gets one value and returns an exit code.

Each option is one annotated field of a keyword-only dataclass, so commands share fields by inheritance (`MemberOptions`) and no function
takes ten parameters. A wrong command line becomes a UsageFault with the command's example in the hint.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from raftmeta.cli.commands import COMMANDS
from raftmeta.cli.escapes import printable
from raftmeta.cli.exits import UsageFault
from raftmeta.client.config import resolve

if TYPE_CHECKING:  # httpx costs 100 ms that `--help` must not pay
    from raftmeta.client import Client

OptionsT = TypeVar("OptionsT")


@dataclass(frozen=True, kw_only=True)
class JsonOptions:
    json: Annotated[bool, typer.Option("--json", help="Print one JSON value and nothing else.")] = False


@dataclass(frozen=True, kw_only=True)
class MemberOptions(JsonOptions):
    """Where the members are and how long to try."""

    url: Annotated[list[str] | None, typer.Option("--url", metavar="URL", help="A member; repeat for more.")] = None
    config: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="A client.toml as `raftmeta init` writes it.")] = None
    timeout: Annotated[
        float | None, typer.Option("--timeout", metavar="SECONDS", min=0.1, max=3600, help="For each call, retries included.")
    ] = None

    def connect(self, on_retry: Callable[[str], None] | None = None) -> Client:
        """Raises RaftmetaError when the settings are wrong; nothing is sent yet. Without `on_retry` the first retry is told."""
        from raftmeta.client import Client, Options

        connection = resolve(self.url or (), self.config)
        options = Options(
            token=connection.token(),
            ca_file=connection.ca_file,
            timeout_s=self.timeout or connection.timeout_s,
            on_retry=on_retry or _TellOnce(quiet=self.json),
        )
        return Client(connection.urls, options=options)


class _TellOnce:
    """Says on a terminal why it takes longer, so that nobody looks at a silent screen."""

    def __init__(self, quiet: bool) -> None:
        self._told = quiet or not sys.stderr.isatty()

    def __call__(self, why: str) -> None:
        if not self._told:
            sys.stderr.write(f"trying again: {printable(why)}\n")
            self._told = True


def command(name: str, options_type: type[OptionsT], function: Callable[[OptionsT], int]) -> Callable[[Sequence[str]], int]:
    """The callable that the table of commands names; `function`'s docstring is its help."""

    def run(argv: Sequence[str]) -> int:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        epilog = f"Example: {COMMANDS[name].example}"
        app.command(help=inspect.getdoc(function), epilog=epilog)(_with_signature(options_type, function))
        try:
            result = app(args=list(argv), prog_name=f"raftmeta {name}", standalone_mode=False)
        except typer.TyperException as fault:
            raise UsageFault(
                fault.format_message().rstrip("."), f"`raftmeta {name} --help`; for example: {COMMANDS[name].example}"
            ) from fault
        except typer.Abort as stop:
            raise KeyboardInterrupt from stop
        return int(result or 0)

    return run


def _with_signature(options_type: type[OptionsT], function: Callable[[OptionsT], int]) -> Callable[..., int]:
    hints = get_type_hints(options_type, include_extras=True)
    assert dataclasses.is_dataclass(options_type)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(options_type)
    ]

    def call(**values: Any) -> int:
        return function(options_type(**values))

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call
