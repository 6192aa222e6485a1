"""`python -m benchmarks commit`: publish commands committed by three members, beside etcd's puts through its JSON gateway.

Ours: 1, 16, 64 and 1,000 coroutines in the leader's process propose `publish` commands of over 300 bytes; three processes, fsync, apply,
the authorizer in place. etcd: 300-byte values, the same numbers of wrk clients at the leader's gateway. Both plain, then both with TLS; our
side and the peer take turns. The figures are not of one kind: ours has no HTTP in it (`rest` has), the peer's has.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

from benchmarks import etcd
from benchmarks.harness import emit, note, row
from raftmeta.cli.init import InitOptions, run

EARLIER_ROLES = ("admin", "agent", "operator", "publisher", "reader")
CLIENTS = (1, 16, 64, 1000)
SECONDS = 4.0
ROUNDS = 3


class Process:
    """A benchmark member, spoken to by lines."""

    def __init__(self, config: Path, tree: Path | None = None) -> None:
        """`tree`: the checkout that it runs, this one for None."""
        command = [*of_tree(tree), sys.executable, "-m", "benchmarks.commit_member", str(config)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, line: str) -> dict[str, object]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a member ended with status {self._process.wait(10)}")
        found: dict[str, object] = json.loads(answer)
        return found

    def end(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


@contextlib.contextmanager
def members(plain: bool, tree: Path | None = None) -> Iterator[tuple[list[Process], etcd.Tls]]:
    """Three members, the leader first, and the TLS files of the first for the peer."""
    with tempfile.TemporaryDirectory(prefix="raftmeta-") as folder, contextlib.ExitStack() as stack:
        made = run(Path(folder) / "cluster", ["a", "b", "c"], InitOptions(base_port=0))
        processes = []
        for file in made.servers:
            if plain:
                make_plain(file)
            if tree is not None:
                for_earlier(file.parent)
            process = Process(file, tree)
            stack.callback(process.end)
            processes.append(process)
        yield _leader_first(processes), tls_files(made.servers[0])


def of_tree(tree: Path | None) -> list[str]:
    """What stands before a command so that it runs the code of another checkout."""
    return [] if tree is None else ["env", "-C", str(tree), f"PYTHONPATH={tree}"]


def for_earlier(directory: Path) -> None:
    """A member's directory without the principals whose roles a build of the first stable API does not know."""
    file = directory / "principals.toml"
    head, *principals = file.read_text().split("[[principal]]")
    known = [each for each in principals if tomllib.loads(each)["role"] in EARLIER_ROLES]
    file.write_text("[[principal]]".join((head, *known)))


def make_plain(file: Path) -> None:
    """The same member without TLS between members."""
    lines = file.read_text().splitlines()
    table = ""
    kept = []
    for line in lines:
        table = line.strip() if line.startswith("[") else table
        if table == "[peer]" and line.split("=")[0].strip() in ("certificate", "key", "authority"):
            continue
        kept.append(line)
        if line.strip() == "[peer]":
            kept.append("plain = true")
    file.write_text("\n".join(kept) + "\n")


def tls_files(server: Path) -> etcd.Tls:
    peer = tomllib.loads(server.read_text())["peer"]
    if peer.get("plain"):
        return etcd.Tls(Path(), Path(), Path())
    folder = server.parent
    return etcd.Tls(folder / peer["certificate"], folder / peer["key"], folder / peer["authority"])


def _leader_first(processes: list[Process]) -> list[Process]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for process in processes:
            if process.ask("status")["role"] == "leader":
                return [process, *(other for other in processes if other is not process)]
        time.sleep(0.1)
    raise RuntimeError("no leader within 30 s")


def wait_leader(process: Process) -> None:
    """Until it leads: of a member that is alone."""
    _leader_first([process])


def wait_linked(processes: list[Process]) -> None:
    """Until all agree on who leads and see each other."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        answers = [process.ask("status") for process in processes]
        agreed = len({(answer["leader"], answer["term"], answer["applied"]) for answer in answers}) == 1
        if agreed and answers[0]["leader"] and all(answer["linked"] for answer in answers):
            return
        time.sleep(0.1)
    raise RuntimeError(f"the members are not linked: {answers}")


def main(arguments: list[str]) -> int:
    missing = etcd.available()
    if missing:
        note(missing)
    quick = "--quick" in arguments
    for plain in (True, False):
        with members(plain) as (processes, tls), contextlib.ExitStack() as stack:
            peer = stack.enter_context(etcd.cluster(None if plain else tls)) if not missing else None
            for clients in CLIENTS:
                _case(processes[0], peer, clients, f"writes c={clients}{'' if plain else ' tls'}", 1 if quick else ROUNDS)
            _compare(processes)
    return 0


def _case(leader: Process, peer: list[str] | None, clients: int, case: str, rounds: int) -> None:
    ours: list[dict[str, object]] = []
    theirs: list[float] = []
    leader.ask(f"load {clients} 1")
    for _ in range(rounds):
        ours.append(leader.ask(f"load {clients} {SECONDS}"))
        if peer:
            theirs.append(etcd.writes(peer[0], clients, SECONDS))
    rate = statistics.median(float(str(sample["rate"])) for sample in ours)
    beside = ("etcd 3.4", statistics.median(theirs)) if theirs else None
    emit(row("commit", case, "1/s", rate, beside))
    for name in ("p50", "p99"):
        emit(row("commit", f"{case} {name}", "ms", statistics.median(float(str(sample[f"{name}_ms"])) for sample in ours)))


def _compare(processes: list[Process]) -> None:
    """What was measured was also right: everyone has the same state."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        answers = [process.ask("status") for process in processes]
        if len({(answer["applied"], answer["hash"]) for answer in answers}) == 1:
            return
        time.sleep(0.1)
    raise RuntimeError(f"the members do not agree: {answers}")
