"""`python -m benchmarks NAME [arguments]`: runs one benchmark, or `all`, and prints its rows as JSON lines.

Every module of this package with a `main(arguments)` is a benchmark. Exit status 0 when all ran, 1 when one failed, 3 for a wrong name.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys

import benchmarks
from benchmarks.harness import note

_NOT_BENCHMARKS = {
    "__main__",
    "harness",
    "etcd",
    "commit_member",
    "member_loads",
    "manifests",
    "writers",
    "process",
    "scale_state",
    "weights",
    "load_peers",
    "asker",
    "encoders",
    "nodes",
    "pourer",
    "check_node",
    "check_fleet",
}
_NOT_IN_ALL = {"against", "failover", "churn", "scale", "soak", "staging"}  # needs to be told a revision; take minutes each


def names() -> list[str]:
    found = (module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    return sorted(name for name in found if name not in _NOT_BENCHMARKS)


def main(arguments: list[str]) -> int:
    known = names()
    if not arguments or arguments[0] in ("-h", "--help"):
        note(f"usage: python -m benchmarks NAME [arguments]\nnames: {', '.join([*known, 'all'])}")
        return 0 if arguments else 3
    name, rest = arguments[0], arguments[1:]
    if name == "all":
        return max([_run(each, rest) for each in known if each not in _NOT_IN_ALL], default=0)
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean `python -m benchmarks {near[0]}`?" if near else ""
        note(f"no benchmark is called {name!r}; there are: {', '.join(known)}{hint}")
        return 3
    return _run(name, rest)


def _run(name: str, arguments: list[str]) -> int:
    module = importlib.import_module(f"benchmarks.{name}")
    if not hasattr(module, "main"):  # a helper of another benchmark
        return 0
    return int(module.main(arguments) or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
