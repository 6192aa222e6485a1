"""The overview that `raftmeta` prints. Plain text with a little weight on a terminal; imports nothing heavy."""

from __future__ import annotations

import shutil
import sys
import textwrap

from raftmeta.cli import commands, exits

_WIDTH_LIMIT = 100


def print_overview() -> None:
    lines = [
        _bold("raftmeta") + ": which weights serve where, decided by a quorum, proven from memory",
        "",
        "usage: raftmeta COMMAND [OPTIONS]        raftmeta COMMAND --help",
    ]
    for group in commands.GROUPS:
        lines += ["", _bold(group)]
        lines += _rows([(name, info.help) for name, info in commands.COMMANDS.items() if info.group == group])
    lines += [
        "",
        _bold("Where the members are"),
        *_rows(
            [
                ("--url URL", "a member, repeat for more; also RAFTMETA_URL=URL,URL; default http://127.0.0.1:7400"),
                ("--config FILE", "a client.toml as `raftmeta init` writes it; also RAFTMETA_CLIENT_CONFIG"),
                ("", "a token is read from its token_file, or from the file that RAFTMETA_TOKEN_FILE names"),
            ]
        ),
        "",
        _bold("Exit codes"),
        *_rows([(str(int(code)), meaning) for code, meaning in exits.MEANINGS]),
        "",
        _bold("Examples"),
        *(f"  {commands.COMMANDS[name].example}" for name in ("demo", "publish", "activate", "check")),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def print_group(word: str, names: list[str]) -> None:
    """The commands below one word, for instance `cluster`."""
    lines = [f"usage: raftmeta {word} COMMAND [OPTIONS]", "", *_rows([(name, commands.COMMANDS[name].help) for name in names])]
    lines += ["", "example: " + commands.COMMANDS[names[0]].example]
    sys.stdout.write("\n".join(lines) + "\n")


def print_below(word: str, names: list[str]) -> None:
    """After the help of a command that does something itself: the commands below it."""
    sys.stdout.write("\n".join(["", "Commands below it:", *_rows([(name, commands.COMMANDS[name].help) for name in names])]) + "\n")


def _rows(rows: list[tuple[str, str]]) -> list[str]:
    width = min(_WIDTH_LIMIT, shutil.get_terminal_size((80, 24)).columns)
    column = max(map(len, commands.COMMANDS))
    lines = []
    for name, text in rows:
        first, *more = textwrap.wrap(text, max(20, width - column - 3)) or [""]
        lines.append(f"  {name:<{column}} {first}")
        lines += [f"  {'':<{column}} {line}" for line in more]
    return lines


def _bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if sys.stdout.isatty() else text
