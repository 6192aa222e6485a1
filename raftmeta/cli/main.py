"""`raftmeta`: finds the command, runs it, and turns every outcome into one exit code and, for errors, one designed pair of lines.

    error: what happened (code)
    hint:  what to do next

Expected errors never show a traceback. With `--json` standard output holds exactly one JSON value, for an error too.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from raftmeta.cli import commands, exits, helptext, suggest
from raftmeta.cli.escapes import json_text, printable
from raftmeta.core.errors import RaftmetaError

Command = Callable[[Sequence[str]], int | None]
CUDA = "CUDA: unproven on a device"  # until tests/device/run.py has filled its table on one; README and docs/guarantees.md say the same


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code; documented in `raftmeta --help`."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except exits.UsageFault as fault:
        return _report(words, "usage", fault.what, fault.hint, exits.Exit.USAGE)
    except RaftmetaError as error:
        return _report(words, error.code, error.detail, exits.hint(error), exits.exit_code(error))
    except SystemExit as end:  # of a parser that ends by itself; its 2 is our usage
        if end.code in (0, None):
            return exits.Exit.OK
        return exits.Exit.USAGE if end.code == 2 else exits.Exit.NO
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return exits.Exit.INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe went away, as `head` does
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.Exit.OK
    except Exception as fault:  # noqa: BLE001 the outermost frame: a defect still ends with its own exit code
        traceback.print_exc()
        return _report(words, "internal", f"{type(fault).__name__}: {fault}", "please report this with the lines above", exits.Exit.FAULT)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("--help", "-h", "help"):
        return _help(words[1:] if words[:1] == ["help"] else [])
    if words[0] in ("--version", "-V", "version"):
        from importlib.metadata import version  # takes a tenth of a command's start, and no other command asks

        sys.stdout.write(f"raftmeta {version('raftmeta')}\n{CUDA}\n")
        return exits.Exit.OK
    if words[0].startswith("-"):
        raise exits.UsageFault(f"{words[0]!r} stands before any command", "options follow the command, for example: raftmeta status --json")
    found = commands.find(words)
    if found is None:
        return _unknown(words)
    name, rest = found
    return _run(name, rest)


def _run(name: str, rest: list[str]) -> int:
    code = int(load(name)(rest) or 0)
    below = commands.below(name)
    if below and rest == ["--help"]:
        helptext.print_below(name, below)
    return code


def load(name: str) -> Command:
    """Import the command's code. Raises UsageFault when an extra of the distribution is missing."""
    info = commands.COMMANDS[name]
    module_name, _, attribute = info.target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as cause:
        missing = cause.name or "?"
        if info.needs and missing.split(".")[0] not in ("raftmeta", "api", "node_agent", "consistency"):
            hint = f"install it: pip install 'raftmeta[{info.needs}]'"
            raise exits.UsageFault(f"`raftmeta {name}` needs the Python package {missing!r}, which is not installed", hint) from cause
        raise
    command: Command = getattr(module, attribute)
    return command


def _help(words: list[str]) -> int:
    if not words:
        helptext.print_overview()
        return exits.Exit.OK
    found = commands.find(words)
    if found is None:
        return _unknown(words)
    return _run(found[0], ["--help"])


def _unknown(words: list[str]) -> int:
    group = commands.below(words[0])
    if group and (len(words) == 1 or words[1] in ("--help", "-h")):
        helptext.print_group(words[0], group)
        return exits.Exit.OK if len(words) > 1 else exits.Exit.USAGE
    if group:
        raise _unknown_below(words[0], words[1], group)
    meant = suggest.nearest(words[0], commands.COMMANDS)
    if meant is None:
        raise exits.UsageFault(f"{words[0]!r} is no command", "`raftmeta --help` lists them; to see everything work: raftmeta demo")
    raise _mistyped(words[0], meant)


def _unknown_below(first: str, second: str, group: Sequence[str]) -> exits.UsageFault:
    """Judged by the second word alone: the first, which all of them share, would make any word look near."""
    endings = [name.removeprefix(f"{first} ") for name in group]
    meant = suggest.nearest(second, endings)
    if meant is not None:
        return _mistyped(f"{first} {second}", f"{first} {meant}")
    hint = f"below `raftmeta {first}` there are {', '.join(endings)}; `raftmeta {first} --help` says what each does"
    return exits.UsageFault(f"{first + ' ' + second!r} is no command", hint)


def _mistyped(typed: str, meant: str) -> exits.UsageFault:
    return exits.UsageFault(f"{typed!r} is no command", f"did you mean `{meant}`? For example: {commands.COMMANDS[meant].example}")


def _report(words: list[str], code: str, what: str, hint: str, exit_code: exits.Exit) -> int:
    if "--json" in words:
        error = {"code": code, "detail": what, "hint": hint, "exit": int(exit_code)}
        sys.stdout.write(json_text({"error": error}) + "\n")
    else:
        sys.stderr.write(f"error: {printable(what)} ({printable(code)})\nhint:  {printable(hint)}\n")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
