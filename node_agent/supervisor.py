"""The supervisor: starts the processes of an agent, starts again what ends, and stops all in order.

It holds what must outlive any of them: the lock on the store directory, the listening socket, the memory that each process counts in, and
for each worker the kernel's word that it has ended, which alone allows its place in the control blocks to be cleared. It loads neither
torch nor a model and makes no decision. A child that keeps ending is started ever more slowly. When the supervisor goes, however it goes,
the kernel takes the children along.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from node_agent import journal, names, tally
from node_agent.config import AgentConfig, child_environment
from node_agent.device import inventory
from node_agent.device.control_block import ControlBlock
from node_agent.journal import DeploymentRecord
from node_agent.refusal import Refusal
from node_agent.runtime import log
from node_agent.tls import server_tls
from raftmeta.core.errors import RaftmetaError
from raftmeta.durable import lock_directory
from raftmeta.security.tokens import load_principals

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0
STEADY_S = 10.0  # a child that lived this long starts again at once
STOP_S = 10.0  # for workers and control to end after SIGTERM
LOOK_S = 5.0  # between looks at the record of the node
BACKLOG = 1024
COUNTING = ("worker", "front", "control")  # the prober counts nothing


@dataclass
class Child:
    role: str
    index: int
    process: subprocess.Popen[bytes] | None = None
    pidfd: int = -1
    started: float = 0.0
    start_at: float = 0.0
    failures: int = 0

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


class Supervisor:
    def __init__(self, config: AgentConfig, config_file: Path, purge_arena: bool = False) -> None:
        """`purge_arena`: remove the arenas at the end, so that no memory is held while the agent is away."""
        self.config = config
        self._purge_arena = purge_arena
        self.boot_id = uuid.uuid4().hex
        self._config_file = config_file
        self._stopping = 0  # signals to stop that came
        self._wake, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._listener = socket.socket()
        self._port = 0
        # workers before the front: its first request finds them; control last, since it asks workers to load
        self._children = [Child("worker", index) for index in range(config.workers)]
        self._children += [Child("front", 0), Child("prober", 0), Child("control", 0)]
        self._node = journal.Follower(config.store_dir)  # what it read last counts while the file is damaged
        self._tallies: dict[str, int] = {}  # descriptors of what each process counts in, by its name

    def run(self) -> int:
        """Returns the exit status once everything has stopped. Raises RaftmetaError when it cannot start."""
        with lock_directory(self.config.store_dir):
            self._prepare_directories()
            self._check_port_files()
            self._fresh_control_blocks()
            self._listener = self._listen()
            self._make_tallies()
            signal.set_wakeup_fd(self._wake_write)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._on_signal)
            log.info("agent_starts", boot_id=self.boot_id, address=self.config.public_url(self._port))
            try:
                while not self._stopping:
                    self._start_due()
                    self._wait(min(self._next_start_s(), LOOK_S))
                    self._reap()
                    self._deployments()
                self._stop()
            finally:
                self._kill_all()
                for fd in self._tallies.values():
                    os.close(fd)
            if self._purge_arena:
                self._purge()
        log.info("agent_stopped")
        return 0

    # --- start

    def _prepare_directories(self) -> None:
        try:
            self.config.sockets_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.config.sockets_dir.chmod(0o700)
            if not self.config.arena_dir.is_dir():
                raise RaftmetaError("bad_field", f"arena_dir {self.config.arena_dir} is no directory")
        except OSError as cause:
            raise RaftmetaError("bad_field", f"run_dir {self.config.sockets_dir} cannot be made: {cause}") from cause

    def _check_port_files(self) -> None:
        """What every front would refuse, said once, before anything runs. Raises RaftmetaError bad_field that names the file."""
        server_tls(self.config)
        if self.config.principals_file is not None:
            load_principals(self.config.principals_file)

    def _fresh_control_blocks(self) -> None:
        """Nothing serves until control has looked at the memory: what an earlier start left there may have rotted.

        Raises RaftmetaError for a damaged record of this node. What is wrong with the file of one deployment is that one's trouble: control
        meets it too, refuses the deployment by name, and serves the others.
        """
        for deployment in self._node.deployments().values():
            path = self.config.arena_dir / deployment.control_block
            try:
                if path.exists():
                    ControlBlock.create(path, ours=True).close()
            except (Refusal, OSError) as cause:
                log.error("control_block_kept", deployment=deployment.name, reason=str(cause))
                _serve_nothing(path)

    def _deployments(self) -> list[DeploymentRecord]:
        """Those of the record that was read last; a record that cannot be read ends no supervisor."""
        try:
            return list(self._node.deployments().values())
        except (RaftmetaError, OSError) as cause:
            log.error("node_record_unreadable", reason=str(cause))
            return []

    def _listen(self) -> socket.socket:
        """The socket of the serving API; its address goes to a file for those who chose port 0."""
        host, port = self.config.host_port
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as cause:
            raise RaftmetaError("bad_field", f"listen {self.config.listen}: {cause}") from cause
        listener.set_inheritable(True)
        self._port = listener.getsockname()[1]
        address = names.address_file(self.config.sockets_dir)
        fresh = address.with_suffix(".fresh")
        fresh.write_text(f"{self.config.public_url(self._port)}\n", "utf-8")
        fresh.rename(address)
        return listener

    def _make_tallies(self) -> None:
        try:
            for child in self._children:
                if child.role in COUNTING:
                    self._tallies[child.name] = tally.make()
        except OSError as cause:
            raise RaftmetaError("internal", f"no memory for what the processes count: {cause}") from cause

    def _start_due(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if child.process is None and child.start_at <= now:
                self._start(child)

    def _start(self, child: Child) -> None:
        command = [sys.executable, "-m", "node_agent.child", "--role", child.role, "--index", str(child.index)]
        command += ["--config", str(self._config_file), "--boot-id", self.boot_id, "--parent", str(os.getpid())]
        command += ["--port", str(self._port)]
        passed: list[int] = []
        if child.role == "front":
            passed.append(self._listener.fileno())
            command += ["--listen-fd", str(passed[0])]
        for name, fd in self._tallies.items():
            is_asked_for = child.role == "front" or (child.role, name) == ("control", "front-0")  # for the page; for the rate of requests
            if name == child.name or is_asked_for:
                passed.append(fd)
                command += ["--tally", f"{name}={fd}"]
        # a group of its own: Ctrl-C on the terminal reaches the supervisor alone, which stops the rest in order
        child.process = subprocess.Popen(
            command, pass_fds=passed, stdin=subprocess.DEVNULL, process_group=0, env=child_environment(self.config)
        )
        child.pidfd = os.pidfd_open(child.process.pid)
        child.started = time.monotonic()
        log.info("process_started", process=child.name, child=child.process.pid)

    # --- run

    def _wait(self, timeout_s: float) -> None:
        """Until a child ends, a signal comes, or the time is up."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        for child in self._children:
            if child.pidfd >= 0:
                poller.register(child.pidfd, select.POLLIN)
        poller.poll(timeout_s * 1000)
        try:
            while os.read(self._wake, 64):
                pass
        except BlockingIOError:
            pass

    def _next_start_s(self) -> float:
        now = time.monotonic()
        return min((max(0.0, child.start_at - now) for child in self._children if child.process is None), default=60.0)

    def _reap(self) -> None:
        for child in self._children:
            if child.process is None or child.process.poll() is None:
                continue
            status = child.process.returncode
            if child.role == "worker":
                self._clear_worker(child)
            self._forget(child)
            now = time.monotonic()
            steady = now - child.started >= STEADY_S or (child.role == "prober" and status == 0)  # it ends after every proof
            child.failures = 1 if steady else child.failures + 1
            wait_s = start_wait_s(child.failures)
            child.start_at = now + wait_s
            if not self._stopping and status != 0:
                log.error("process_ended", process=child.name, status=status, lived_s=round(now - child.started, 3), again_in_s=wait_s)

    def _clear_worker(self, child: Child) -> None:
        """Free the dead worker's row in every control block, with its pidfd as the witness."""
        for deployment in self._deployments():
            try:
                block = ControlBlock.open(self.config.arena_dir / deployment.control_block)
            except FileNotFoundError:
                continue
            except (Refusal, OSError) as cause:
                log.error("control_block_unreadable", deployment=deployment.name, reason=str(cause))
                continue
            try:
                block.clear_dead(child.index, child.pidfd)
            except Refusal as refusal:
                log.error("worker_row_kept", deployment=deployment.name, reason=str(refusal))
            finally:
                block.close()

    # --- stop

    def _on_signal(self, number: int, frame: object) -> None:
        self._stopping += 1

    def _stop(self) -> None:
        """The front drains while the workers still compute, then the rest ends."""
        self._listener.close()  # the front has its own; once that is closed nobody waits in vain
        front_s = self.config.drain_s + self.config.request_deadline_s + 5.0
        self._end([child for child in self._children if child.role == "front"], front_s)
        self._end([child for child in self._children if child.role != "front"], STOP_S)

    def _end(self, children: list[Child], limit_s: float) -> None:
        """SIGTERM, then SIGKILL past the limit or at a second signal to us; a prober is killed at once."""
        deadline = time.monotonic() + limit_s
        for child in children:
            if child.process is None:
                continue
            if child.role == "prober":  # nothing to finish, and on a busy machine deep in an import for longer than the limit
                child.process.kill()
            else:
                child.process.terminate()
        while any(child.process is not None for child in children):
            left = deadline - time.monotonic()
            if left <= 0 or self._stopping > 1:
                for child in children:
                    if child.process is not None:
                        log.error("process_killed", process=child.name)
                        child.process.kill()
                        child.process.wait()
            else:
                self._wait(left)
            self._reap()

    def _purge(self) -> None:
        """Every process that mapped an arena has ended."""
        for deployment in self._deployments():
            freed = inventory.reclaim(self.config.arena_dir / deployment.arena)
            log.info("arena_purged", deployment=deployment.name, freed_bytes=freed)

    def _kill_all(self) -> None:
        for child in self._children:
            if child.process is not None:
                child.process.kill()
                child.process.wait()
                self._forget(child)

    def _forget(self, child: Child) -> None:
        os.close(child.pidfd)
        child.pidfd = -1
        child.process = None


def _serve_nothing(path: Path) -> None:
    """Of a block that stays because a worker of an earlier start still runs: whoever enters from now on finds that nothing serves."""
    with suppress(Refusal, OSError):
        block = ControlBlock.open(path)
        block.serve_nothing()
        block.close()


def start_wait_s(failures: int) -> float:
    """Before a child that ended `failures` times in a row, soon after it began, is started again. The first time at once."""
    return 0.0 if failures <= 1 else min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(failures - 2, 30))
