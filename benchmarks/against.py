"""`python -m benchmarks against REVISION`: this tree beside an earlier revision of it, in interleaved pairs.

Two clusters stand on this machine, one of each revision, with the same interpreter and packages; one idles while the other is under load,
and they take turns in going first. A case's ratio is the median of the pairs' ratios, so that what disturbs the machine for longer than a
pair disturbs both. `--pairs N` (10), `--seconds S` a load (2), `--only TEXT` takes the cases whose names hold the text, `--tls` loads TLS.
Needs wrk and the repository's history; an earlier revision reads the configuration that this one writes.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import commit, rest
from benchmarks.harness import emit, note, row

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Case:
    name: str
    unit: str
    here: Callable[[float], float]  # one load of that many seconds
    there: Callable[[float], float]


@contextlib.contextmanager
def worktree(revision: str) -> Iterator[tuple[Path, str]]:
    """A checkout of the revision and its short name. Raises CalledProcessError when there is no such revision."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run([*git, "rev-parse", "--short", revision], check=True, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="raftmeta-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree, name
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)


@contextlib.contextmanager
def commit_cases(tree: Path, plain: bool) -> Iterator[list[Case]]:
    with commit.members(plain) as (here, _), commit.members(plain, tree) as (there, _):

        def rate(side: list[commit.Process], clients: int, seconds: float) -> float:
            return float(str(side[0].ask(f"load {clients} {seconds}")["rate"]))

        yield [
            Case(f"commit writes c={clients}", "1/s", partial(rate, here, clients), partial(rate, there, clients))
            for clients in commit.CLIENTS
        ]


@contextlib.contextmanager
def rest_cases(tree: Path, plain: bool) -> Iterator[list[Case]]:
    with rest.members(plain) as here, rest.members(plain, tree) as there:
        loads: list[tuple[str, Callable[[rest.Ours, float], float]]] = [
            ("rest writes c=64", lambda side, s: side.put(side.urls[0], 64, s).rate),
            ("rest writes follower c=64", lambda side, s: side.put(side.urls[1], 64, s).rate),
            ("rest reads linearizable c=64", lambda side, s: side.get(side.urls[0], 64, seconds=s).rate),
            ("rest reads linearizable follower c=64", lambda side, s: side.get(side.urls[1], 64, seconds=s).rate),
            ("rest reads stale c=64", lambda side, s: side.get(side.urls[0], 64, "?consistency=stale", s).rate),
            ("rest batch items", lambda side, s: side.batch(side.urls[0], 4, s)),
        ]
        yield [Case(name, "1/s", partial(load, here), partial(load, there)) for name, load in loads]


BENCHES = {"commit": commit_cases, "rest": rest_cases}


def measure(case: Case, pairs: int, seconds: float, revision: str) -> None:
    case.here(1.0)
    case.there(1.0)
    ours: list[float] = []
    theirs: list[float] = []
    for turn in range(pairs):
        if turn % 2:
            theirs.append(case.there(seconds))
            ours.append(case.here(seconds))
        else:
            ours.append(case.here(seconds))
            theirs.append(case.there(seconds))
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    peer = statistics.median(theirs)
    emit(row("against", case.name, case.unit, statistics.median(ratios) * peer, (f"revision {revision}", peer)))
    note(f"{case.name}: ratios of {pairs} pairs {min(ratios):.3f} to {max(ratios):.3f}, median {statistics.median(ratios):.3f}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks against", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("revision")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one load")
    parser.add_argument("--bench", choices=tuple(BENCHES), help="one of them, both when left out")
    parser.add_argument("--only", default="", help="cases whose names hold this text")
    parser.add_argument("--tls", action="store_true", help="connections between members and of clients with TLS")
    options = parser.parse_args(arguments)
    if shutil.which("wrk") is None:
        note("wrk not found; on Debian: apt-get install wrk")
        return 1
    with worktree(options.revision) as (tree, name):
        for bench in [options.bench] if options.bench else BENCHES:
            with BENCHES[bench](tree, not options.tls) as cases:
                for case in cases:
                    if options.only in case.name:
                        measure(case, options.pairs, options.seconds, name)
    return 0
