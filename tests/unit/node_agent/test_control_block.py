from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from node_agent.device import checked
from node_agent.device.control_block import MAX_WORKERS, NO_SLOT, ControlBlock, _Header, pack_active, unpack_active
from node_agent.device.membarrier import Kind, Membarrier
from node_agent.device.process import has_ended, is_running, pid_of, start_ticks, this_process
from node_agent.device.words import words
from node_agent.refusal import Refusal
from node_agent.slots import WorkerGate
from tests.support.shm import line_of, python_process

ATTACHED_WORKER = """
import sys
from pathlib import Path
from node_agent.device.control_block import ControlBlock
from node_agent.slots import WorkerGate
gate = WorkerGate(ControlBlock.open(Path(sys.argv[1])), int(sys.argv[2]))
if gate._block.active()[0] != 255:
    print(gate.enter(), flush=True)
else:
    print("attached", flush=True)
sys.stdin.read()
"""


def rewrite_header(path: Path, **changes: object) -> None:
    header = checked.read(path.read_bytes()[:4096], _Header)
    assert header is not None
    with path.open("r+b") as file:
        file.write(checked.encode(msgspec.structs.replace(header, **changes), 4096))


def test_a_new_block_has_no_active_slot_no_worker_and_all_processes_see_the_same_words(shm: Path) -> None:
    block = ControlBlock.create(shm / "control")
    assert block.active() == (NO_SLOT, 0)
    assert block.attached() == ()
    assert stat.S_IMODE((shm / "control").stat().st_mode) == 0o660
    other = ControlBlock.open(shm / "control")
    block.words[0] = pack_active(1, 77)
    assert other.active() == (1, 77)
    assert other.block_id == block.block_id
    assert [path.name for path in shm.iterdir()] == ["control"]


def test_slot_and_epoch_share_one_word() -> None:
    for slot in (0, 1, NO_SLOT):
        for epoch in (0, 1, 2**40, 2**56 - 1):
            assert unpack_active(pack_active(slot, epoch)) == (slot, epoch)
            assert pack_active(slot, epoch) < 2**64


def test_a_worker_has_a_row_of_its_own_in_cache_lines_of_its_own(shm: Path) -> None:
    block = ControlBlock.create(shm / "control")
    gate = WorkerGate(block, 5)
    block.beat(5, 123)
    block.acknowledge(5, 9)
    row = block.row(5)
    assert row is not None
    assert (row.process, row.in_flight, row.acknowledged, row.heartbeat_ns) == (this_process(), (0, 0), 9, 123)
    assert [each.index for each in block.attached()] == [5]
    gate.beat()
    beaten = block.row(5)
    assert beaten is not None
    assert 0 <= time.monotonic_ns() - beaten.heartbeat_ns < 60 * 10**9
    changed = [index for index, word in enumerate(block.words.tolist()) if word and index]
    assert {index // 16 for index in changed} == {6}, "rows are 128 bytes, the active word has the first"
    with pytest.raises(ValueError, match="outside"):
        block.row(MAX_WORKERS)


def test_a_row_that_names_a_running_worker_is_not_given_to_another(shm: Path) -> None:
    block = ControlBlock.create(shm / "control")
    WorkerGate(block, 0)
    with pytest.raises(Refusal, match=rf"worker_alive.*process {os.getpid()} .*running"):
        WorkerGate(ControlBlock.open(shm / "control"), 0)


def test_a_clean_end_gives_the_row_back_but_not_with_a_request_in_flight(shm: Path) -> None:
    block = ControlBlock.create(shm / "control")
    block.words[0] = pack_active(0, 1)
    gate = WorkerGate(block, 0)
    gate.enter()
    with pytest.raises(Refusal, match="slot_busy"):
        gate.detach()
    gate.leave(0)
    gate.detach()
    assert block.attached() == ()
    assert not any(block.words[1:].tolist())
    WorkerGate(block, 0)


def test_counts_of_a_worker_are_cleared_only_once_the_kernel_says_that_it_ended(shm: Path) -> None:
    block = ControlBlock.create(shm / "control")
    block.words[0] = pack_active(1, 3)
    with python_process(ATTACHED_WORKER, str(block.path), "2") as worker, python_process("input()") as bystander:
        pidfd, other = os.pidfd_open(worker.pid), os.pidfd_open(bystander.pid)
        assert line_of(worker) == "1"
        held = block.row(2)
        assert held is not None
        assert held.in_flight == (0, 1)
        with pytest.raises(Refusal, match=rf"worker_alive.*process {worker.pid} .*a running one"):
            block.clear_dead(2, pidfd)
        bystander.kill()
        bystander.wait()
        with pytest.raises(Refusal, match="worker_alive"):  # a dead process's pidfd does not speak for a living worker
            block.clear_dead(2, other)
        assert block.row(2) == held
        worker.kill()
        assert os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT) is not None
        with pytest.raises(Refusal, match=r"worker_alive.*ended, but not cleared"):
            WorkerGate(block, 2)
        block.clear_dead(2, pidfd)
        assert block.row(2) is None
        assert not any(block.words[1:].tolist())
        block.clear_dead(2, pidfd)  # again does nothing
        os.close(pidfd)
        os.close(other)


FIRST_THREAD_ENDS = """
import ctypes, sys, threading, time
from pathlib import Path
from node_agent.device.control_block import ControlBlock
ControlBlock.open(Path(sys.argv[1])).attach(0)
threading.Thread(target=time.sleep, args=(600,)).start()
print("attached", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_worker_whose_first_thread_ended_is_not_cleared_while_another_thread_runs(shm: Path) -> None:
    block = ControlBlock.create(shm / "control")
    with python_process(FIRST_THREAD_ENDS, str(block.path)) as worker:
        assert line_of(worker) == "attached"
        pidfd = os.pidfd_open(worker.pid)
        stat_file = Path(f"/proc/{worker.pid}/stat")
        until(lambda: b") Z " in stat_file.read_bytes(), "the first thread to end")
        row = block.row(0)
        assert row is not None
        assert is_running(row.process)
        with pytest.raises(Refusal, match="worker_alive"):
            block.clear_dead(0, pidfd)
        os.close(pidfd)


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.005)


def test_a_pidfd_of_a_running_process_does_not_speak_for_an_ended_worker(shm: Path) -> None:
    block = ControlBlock.create(shm / "control")
    with python_process(ATTACHED_WORKER, str(block.path), "0") as worker, python_process("input()") as bystander:
        assert line_of(worker) == "attached"
        worker.kill()
        worker.wait()
        pidfd = os.pidfd_open(bystander.pid)
        with pytest.raises(Refusal, match=r"worker_alive.*a running one"):
            block.clear_dead(0, pidfd)
        os.close(pidfd)


def test_a_pidfd_of_another_ended_process_clears_nothing(shm: Path) -> None:
    block = ControlBlock.create(shm / "control")
    with python_process(ATTACHED_WORKER, str(block.path), "0") as worker, python_process("pass") as other:
        assert line_of(worker) == "attached"
        pidfd = os.pidfd_open(other.pid)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        worker.kill()
        worker.wait()
        with pytest.raises(Refusal, match=rf"worker_alive.*a pidfd of {worker.pid}, found one of {other.pid}"):
            block.clear_dead(0, pidfd)
        os.close(pidfd)


def test_a_block_is_not_replaced_while_a_worker_of_it_runs(shm: Path) -> None:
    old = ControlBlock.create(shm / "control")
    with python_process(ATTACHED_WORKER, str(old.path), "0") as worker:
        assert line_of(worker) == "attached"
        with pytest.raises(Refusal, match=rf"worker_alive.*worker 0, process {worker.pid} "):
            ControlBlock.create(shm / "control")
        assert ControlBlock.open(shm / "control").block_id == old.block_id
    fresh = ControlBlock.create(shm / "control")
    assert fresh.block_id != old.block_id
    assert fresh.attached() == ()


def test_a_block_of_another_boot_is_refused_by_open_and_replaced_by_create(shm: Path) -> None:
    ControlBlock.create(shm / "control")
    rewrite_header(shm / "control", boot_id="earlier")
    with pytest.raises(Refusal, match=r"foreign_control_block.*boot earlier"):
        ControlBlock.open(shm / "control")
    assert ControlBlock.create(shm / "control").active() == (NO_SLOT, 0)


@pytest.mark.parametrize("content", [b"", b"x" * 16384, b"x" * 100])
def test_a_file_that_is_no_block_is_neither_opened_nor_replaced(shm: Path, content: bytes) -> None:
    (shm / "control").write_bytes(content)
    for attempt in (ControlBlock.open, ControlBlock.create):
        with pytest.raises(Refusal, match="foreign_control_block"):
            attempt(shm / "control")
    assert (shm / "control").read_bytes() == content


@pytest.mark.parametrize("content", [b"", b"x" * 16384, b"x" * 100])
def test_a_file_that_only_we_make_is_replaced_whatever_it_holds_unless_control_has_its_lock(shm: Path, content: bytes) -> None:
    path = shm / "control"
    with contextlib.closing(ControlBlock.create(path)) as block:
        block.lock_control()
        with open(path, "r+b") as file:
            file.write(content or b"x")
        with pytest.raises(Refusal, match="control_in_use"):
            ControlBlock.create(path, ours=True)
    path.write_bytes(content)
    assert ControlBlock.create(path, ours=True).active() == (NO_SLOT, 0)
    path.unlink()
    path.symlink_to(shm / "elsewhere")
    (shm / "elsewhere").write_bytes(b"mine")
    with pytest.raises(OSError, match="symbolic links"):
        ControlBlock.create(path, ours=True)
    assert (shm / "elsewhere").read_bytes() == b"mine"


def test_one_process_at_a_time_is_control(shm: Path) -> None:
    first = ControlBlock.create(shm / "control")
    first.lock_control()
    second = ControlBlock.open(shm / "control")
    with pytest.raises(Refusal, match="control_in_use"):
        second.lock_control()
    first.close()
    second.lock_control()


def test_words_must_be_aligned_and_inside_the_mapping() -> None:
    mapping = mmap.mmap(-1, 4096)
    assert len(words(mapping, 8, 2)) == 2
    for offset, count in ((4, 1), (4096, 1), (4088, 2)):
        with pytest.raises(ValueError, match="not aligned or leave"):
            words(mapping, offset, count)


class FakeKernel:
    """membarrier of a kernel that offers `mask`; commands in `failing` answer with that error."""

    def __init__(self, mask: int, failing: dict[int, int] | None = None) -> None:
        self.mask = mask
        self.failing = failing or {}
        self.calls: list[int] = []

    def __call__(self, command: int) -> int:
        self.calls.append(command)
        if command in self.failing:
            return -self.failing[command]
        return self.mask if command == 0 else 0


ALL = 1 | 2 | 4


def test_the_expedited_barrier_is_registered_before_it_is_used() -> None:
    kernel = FakeKernel(ALL)
    barrier = Membarrier(syscall=kernel)
    barrier()
    assert barrier.kind is Kind.GLOBAL_EXPEDITED
    assert kernel.calls == [0, 4, 2]


def test_a_kernel_without_the_expedited_barrier_gets_the_slow_one() -> None:
    kernel = FakeKernel(1)
    barrier = Membarrier(syscall=kernel)
    barrier()
    assert barrier.kind is Kind.GLOBAL
    assert kernel.calls == [0, 1]


def test_a_process_takes_the_barrier_of_its_control_block_or_does_not_start(shm: Path) -> None:
    assert Membarrier(Kind.GLOBAL, FakeKernel(ALL)).kind is Kind.GLOBAL
    with pytest.raises(Refusal, match=r"barrier_unavailable.*GLOBAL_EXPEDITED.*mask 0x1"):
        Membarrier(Kind.GLOBAL_EXPEDITED, FakeKernel(1))
    ControlBlock.create(shm / "control")
    rewrite_header(shm / "control", barrier=1)
    assert ControlBlock.open(shm / "control").barrier.kind is Kind.GLOBAL


@pytest.mark.parametrize(
    ("kernel", "found"),
    [
        (FakeKernel(0), "mask 0x0"),
        (FakeKernel(ALL, {0: errno.ENOSYS}), "ENOSYS"),
        (FakeKernel(ALL, {0: errno.EPERM}), "EPERM"),
        (FakeKernel(ALL, {4: errno.EINVAL}), "EINVAL"),
    ],
)
def test_without_a_barrier_nothing_starts(kernel: FakeKernel, found: str) -> None:
    with pytest.raises(Refusal, match=f"barrier_unavailable.*{found}"):
        Membarrier(syscall=kernel)


def test_a_barrier_that_fails_later_is_an_error_and_not_a_switch() -> None:
    with pytest.raises(Refusal, match=r"barrier_unavailable.*GLOBAL_EXPEDITED.*EPERM"):
        Membarrier(syscall=FakeKernel(ALL, {2: errno.EPERM}))()


def test_a_process_is_its_pid_and_its_start_and_a_zombie_has_ended() -> None:
    me = this_process()
    assert is_running(me)
    assert not is_running(msgspec.structs.replace(me, start_ticks=me.start_ticks + 1))
    with python_process("pass") as child:
        pidfd = os.pidfd_open(child.pid)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        assert start_ticks(child.pid) is None
        assert has_ended(pidfd)
        assert pid_of(pidfd) == child.pid
        child.wait()
        assert pid_of(pidfd) == -1
        os.close(pidfd)
    with open(os.devnull) as file, pytest.raises(ValueError, match="no pidfd"):
        pid_of(file.fileno())
