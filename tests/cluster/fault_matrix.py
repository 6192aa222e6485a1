"""What happens when something fails at a given phase of an update: `python -m tests.cluster.fault_matrix [--only TEXT]` prints the table.

A real agent (two workers) serves one version under load while a rollout brings another. The rollout is kept at a phase from outside, by a
source that stalls, a small budget, a process that is stopped or a command that is held back; then the fault strikes, and all goes on.
A row is good when the rollout ended as the table says, with the class that it says; no request was lost or answered with other bytes than
its label names (a killed front may drop what it had in its hands); and the memory of what then serves has the vector of its manifest. A
pair that cannot happen is in the table with the reason. Exit status 1 when a row is not as it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from raftmeta.core.commands import AdvanceRollout
from raftmeta.core.types import Phase, Stage
from tests.support.agent_kinds import ENCODER, TEXTS
from tests.support.agent_process import PATIENCE_S, AgentProcess, Driver, OpenLoop, Tally
from tests.support.artifact_source import ArtifactSource, Mood, artifact_source
from tests.support.encoder_answers import answer_of
from tests.support.fake_control_plane import FakeControlPlane

DEPLOYMENT = "search"
FAULT_S = 6.0  # a fault that does not end the rollout goes away after that
BASE = "1.0.0"
ARENA_MB = 64  # of the file system that can be filled
DISK_MB = 192  # of the store, which keeps 64 of them in reserve
STAGE_BYTES_PER_S = 60_000  # a version of 120 kB then takes two seconds beside requests
RATE = 5.0  # requests a second
ROOM_BYTES = 1 << 20  # of address space that a process keeps beyond what it has
FRONT_MAY_DROP = 4  # requests in the hands of a killed front

DONE = "done"
PHASES = ("idle", "fetch", "fill", "verify", "probe", "bind", "ready", "switch")
FAULTS = (
    "kill control", "kill worker", "kill front", "kill prober", "full arena", "full store", "no memory in control",
    "no memory in prober", "source cut", "source slow", "source lies", "source gone",
)  # fmt: skip
EXHAUSTED = "failed resource_exhausted"


class Cell(NamedTuple):
    """How the rollout may end, with the class of its failure; or why this pair cannot be made."""

    ends: tuple[str, ...] = (DONE,)
    impossible: str = ""


def expected(phase: str, fault: str) -> Cell:
    """The table."""
    kind, _, of = fault.partition(" ")
    match kind:
        case "source":
            if phase != "fetch":
                return Cell(impossible="nothing is read from a source then")
            ends = {"cut": DONE, "slow": DONE, "lies": "failed integrity_mismatch", "gone": "failed source_unavailable"}
            return Cell((ends[of],))
        case "kill":
            return Cell(("failed warmup_failed",)) if (phase, of) == ("probe", "prober") else Cell()
        case "full":
            if phase in ("fetch", "fill"):
                return Cell((DONE, EXHAUSTED))  # it depends on what was still to be written when the room was gone
            return Cell()
        case _:
            if fault.endswith("prober"):
                return Cell((DONE, EXHAUSTED)) if phase == "probe" else Cell(impossible="the prober has nothing to do then")
            return Cell((DONE, EXHAUSTED))  # what it holds already may be enough


@dataclass
class Row:
    phase: str
    fault: str
    cell: Cell
    ended: str = ""
    serves: str = ""
    tally: Tally = field(default_factory=Tally)
    bad: list[str] = field(default_factory=list)  # what is not as it should be

    def __str__(self) -> str:
        if self.cell.impossible:
            return f"{self.phase:7} {self.fault:21} {'-':28} {self.cell.impossible}"
        counts = f"{self.tally.sent:4} asked {len(self.tally.lost):2} lost {len(self.tally.wrong):2} wrong"
        return f"{self.phase:7} {self.fault:21} {self.ended:28} {counts}, serves {self.serves:7} {'; '.join(self.bad) or 'ok'}"


class Matrix:
    """A node with a control plane and a source that obey us."""

    def __init__(self, artifacts: Path, arena_dir: Path, store_dir: Path, source: ArtifactSource) -> None:
        self.artifacts, self.arena_dir, self.store_dir, self.source = artifacts, arena_dir, store_dir, source
        self.plane = FakeControlPlane()
        self.plane.start()
        self.driver = Driver(self.plane)
        self.agent = AgentProcess(
            store_dir / "node", arena_dir, self.plane.url, workers=2, stage_bytes_per_s=STAGE_BYTES_PER_S, verify_max_age_s=0,
            fetch_timeout_s=3.0, fetch_attempts=3,
        )  # fmt: skip
        self.answers: dict[str, Any] = {}
        self.roots: dict[str, str] = {}
        self.new_version()
        self.driver.declare("n1")
        self.agent.start()
        assert self.driver.activate(BASE)["status"] == DONE, self.agent.log[-3000:]

    def close(self) -> None:
        self.agent.close()
        self.plane.close()

    def run(self, phase: str, fault: str) -> Row:
        """One row: get there under load, let it strike, and see what comes of it."""
        row = Row(phase, fault, expected(phase, fault))
        if row.cell.impossible:
            return row
        label = self._prepare(phase)

        def work() -> None:
            with ExitStack() as held, ExitStack() as struck:
                rollout = self._reach(phase, label, held)
                struck.enter_context(self._strike(fault))
                held.close()
                row.ended = self._end_of(rollout, struck)

        async def whole() -> Tally:
            loop = OpenLoop(self.agent.url, ENCODER.body, self.answers, RATE)
            async with loop.running() as tally:
                await asyncio.to_thread(work)
                await asyncio.to_thread(self._settle)
            return tally

        row.tally = asyncio.run(whole())
        row.serves = self.driver.serving
        row.bad = list(self._faults(row))
        return row

    # --- before, at and after

    def _prepare(self, phase: str) -> str:
        """The version that the rollout brings; of a roll-back the one that served before."""
        self.source.be(Mood.HONEST)
        self.plane.hold(lambda body: False)
        label = self.new_version()
        if phase == "verify":
            assert self.driver.activate(label)["status"] == DONE, self.agent.log[-3000:]
        self.be_at_rest()
        return label

    def be_at_rest(self) -> None:
        """Serve the base version, with nothing left to do."""
        if self.driver.serving != BASE:
            assert self.driver.activate(BASE)["status"] == DONE, self.agent.log[-3000:]
        self._settle()

    def new_version(self) -> str:
        """Published, with what it answers and its vector; nothing of it is on the node."""
        number = len(self.roots) + 1
        label = f"{number}.0.0"
        directory = ENCODER.write(self.artifacts / f"v{number}", number)
        manifest = ENCODER.manifest_of(directory)
        self.driver.publish(label, msgspec.structs.replace(manifest, sources=(self.source.url_of(directory),)))
        self.answers[label] = answer_of(directory, TEXTS)
        self.roots[label] = manifest.vector_root
        return label

    def _reach(self, phase: str, label: str, held: ExitStack) -> str:
        """Begin a rollout and keep it at the phase until `held` is closed. Its id, "" while there is none."""
        if phase == "idle":
            return ""
        if phase == "fetch":
            asked = self.source.asked
            self.source.be(Mood.STALLS)
            held.callback(lambda: self.source.mood is Mood.STALLS and self.source.be(Mood.HONEST))
            rollout = self.driver.begin(label)
            self.agent.until(lambda: self.source.asked > asked, "the source is asked")
            return rollout
        if phase in ("probe", "bind"):
            prober = ExitStack()
            held.enter_context(prober)
            prober.enter_context(stopped(self.agent.child("prober")))
            rollout = self.driver.begin(label)
            self._until_doing("Warm", steady_s=1.0)
            if phase == "bind":
                held.enter_context(stopped(self.agent.child("worker")))
                prober.close()
                self.agent.until(lambda: self._logged("proved", label), f"{label} is proved")
            return rollout
        if phase in ("ready", "switch"):
            self.plane.hold(lambda body: isinstance(body, AdvanceRollout) and body.from_phase is Phase.SYNCING)
            held.callback(self.plane.hold, lambda body: False)
            rollout = self.driver.begin(label)
            self.plane.until(lambda state: _stages(state, rollout) == {Stage.READY}, f"{label} is ready", PATIENCE_S)
            if phase == "switch":
                held.enter_context(stopped(self.agent.child("worker")))
                self.plane.hold(lambda body: False)
                self._until_doing("SwitchTo", steady_s=0.5)
            return rollout
        rollout = self.driver.begin(label)  # a roll-back is an activation of what a slot holds already
        self._until_doing({"fill": "StageInto", "verify": "Verify"}[phase])
        return rollout

    @contextmanager
    def _strike(self, fault: str) -> Iterator[None]:
        kind, _, of = fault.partition(" ")
        if kind == "kill":
            os.kill(self._victim(of), signal.SIGKILL)
            yield
        elif kind == "source":
            self.source.be({"cut": Mood.CUT, "slow": Mood.CRAWLS, "lies": Mood.LIES, "gone": Mood.GONE}[of])
            yield
        elif kind == "full":
            with filled(self.arena_dir if of == "arena" else self.store_dir):
                yield
        else:
            with no_memory(self.agent.child(of.rpartition(" ")[2])):
                yield

    def _victim(self, role: str) -> int:
        """The stopped one, if one of the role is."""
        pids = [pid for pid, name in self.agent.children().items() if name == role]
        return next((pid for pid in pids if state_of(pid) == "T"), pids[0])

    def _end_of(self, rollout: str, struck: ExitStack) -> str:
        """How the rollout ended. What has not ended it within FAULT_S passes by then."""
        deadline = time.monotonic() + FAULT_S
        while rollout and self._running(rollout) and time.monotonic() < deadline:
            time.sleep(0.05)
        struck.close()
        if not rollout:
            return DONE
        found = self.driver.finish(rollout)
        return DONE if found["status"] == DONE else f"{found['status']} {found['failure']['code']}"

    def _running(self, rollout: str) -> bool:
        return str(self.plane.state.rollouts[rollout].status) == "running"

    def _settle(self) -> None:
        self.agent.until_settled(self.driver.serving)
        self.agent.until_ready()

    def _faults(self, row: Row) -> Iterator[str]:
        if row.ended not in row.cell.ends:
            yield f"it ended as {row.ended!r}, expected {' or '.join(row.cell.ends)}"
        allowed = FRONT_MAY_DROP if row.fault == "kill front" else 0
        if len(row.tally.lost) > allowed:
            yield f"{len(row.tally.lost)} lost: {row.tally.lost[0]}"
        if row.tally.wrong:
            yield f"answers of other bytes: {row.tally.wrong}"
        vector = self.agent.get(f"/raftmeta/v1/vector/{DEPLOYMENT}").json()
        if vector["version"] != row.serves or vector["vector_root"] != self.roots[row.serves]:
            yield f"the memory that serves is {vector['version']} {vector['vector_root'][:12]}, not {row.serves}"

    def _until_doing(self, step: str, steady_s: float = 0.0) -> None:
        since: list[float] = []

        def look() -> bool:
            found = self.agent.status().get("deployments", {}).get(DEPLOYMENT, {})
            if not found.get("doing", "").startswith(step):
                since.clear()
                return False
            since.append(time.monotonic())
            return since[-1] - since[0] >= steady_s

        self.agent.until(look, f"the node takes the step {step}")

    def _logged(self, event: str, label: str) -> bool:
        return any(f'"event": "{event}"' in line and f'"version": "{label}"' in line for line in self.agent.log.splitlines())


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it was killed meanwhile
            os.kill(pid, signal.SIGCONT)


@contextmanager
def filled(directory: Path) -> Iterator[None]:
    """The file system of this directory has no room left."""
    path = directory / "filler"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    size = 0
    try:
        step = 1 << 20
        while step >= 1:
            try:
                os.posix_fallocate(fd, size, step)
                size += step
            except OSError:
                step //= 2
        yield
    finally:
        os.close(fd)
        path.unlink()


@contextmanager
def no_memory(pid: int) -> Iterator[None]:
    """The process gets hardly any more address space."""
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (size + ROOM_BYTES, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it ended for lack of memory
            resource.prlimit(pid, resource.RLIMIT_AS, before)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _stages(state: Any, rollout: str) -> set[Stage]:
    return {attestation.stage for attestation in state.rollouts[rollout].attestations}


@contextmanager
def small_file_system(directory: Path, size_mb: int) -> Iterator[Path]:
    """A file system of its own, gone with the block. Raises OSError where nothing may be mounted."""
    directory.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(directory)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise OSError(done.stderr.strip())
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@contextmanager
def matrix() -> Iterator[Matrix]:
    with tempfile.TemporaryDirectory(prefix="raftmeta-") as folder, ExitStack() as stack:
        root = Path(folder)
        artifacts = root / "artifacts"
        artifacts.mkdir()
        source = stack.enter_context(artifact_source(artifacts))
        arena_dir = stack.enter_context(small_file_system(root / "arena", ARENA_MB))
        store_dir = stack.enter_context(small_file_system(root / "disk", DISK_MB))
        made = Matrix(artifacts, arena_dir, store_dir, source)
        try:
            yield made
        finally:
            made.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.fault_matrix", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows that hold TEXT, as `fill kill control`")
    options = parser.parse_args()
    pairs = [(phase, fault) for phase in PHASES for fault in FAULTS if options.only in f"{phase} {fault}"]
    counts = dict.fromkeys(("made", "impossible", "not ok"), 0)
    begin = time.monotonic()
    with matrix() as node:
        for phase, fault in pairs:
            row = node.run(phase, fault)
            print(row, flush=True)
            counts["impossible" if row.cell.impossible else "made"] += 1
            counts["not ok"] += bool(row.bad)
    print(f"{', '.join(f'{count} {name}' for name, count in counts.items())}, {time.monotonic() - begin:.0f} s")
    return 1 if counts["not ok"] else 0


if __name__ == "__main__":
    sys.exit(main())
