"""What a run on a device measures, each beside a figure of the same machine in the same run. Medians of a few turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from consistency import vector_torch
from node_agent.device.control_block import ControlBlock
from node_agent.device.torch_feed import BUFFER_BYTES
from node_agent.slots import Switch, WorkerGate
from tests.device.places import WIDE, place, weights
from tests.support.shm import shm_directory

TURNS = 5


def staging(device_name: str, tensors: int) -> str:
    """From host memory into a slot, verified there, against a copy from pinned memory alone."""
    size = tensors * WIDE
    versions = [weights(tensors, seed) for seed in (1, 2)]
    with place(device_name, tensors) as here:
        pinned = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=here.memory.is_cuda)

        def copy() -> None:
            for begin in range(0, size, BUFFER_BYTES):
                piece = min(BUFFER_BYTES, size - begin)
                here.memory[begin : begin + piece].copy_(pinned[:piece], non_blocking=True)

        ours = []
        for turn in range(TURNS):
            staging_now = here.prepared(turn % 2, versions[turn // 2 % 2])
            here.active = None  # or the other slot's bytes would be copied within the device
            begin = time.perf_counter()
            counters = staging_now().counters
            ours.append(size / (time.perf_counter() - begin) / 1e9)
            assert counters.bytes_read == size, "every byte came from host memory"
        peer = _rate(copy, size, here.memory)
    return f"{statistics.median(ours):.2f} GB/s verified, {peer:.2f} GB/s copied from pinned memory"


def vector(device_name: str, size: int) -> str:
    """Block checks of bytes on the device against a copy of them there, which reads and writes each."""
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device_name)
    other = torch.empty_like(data)
    ours = _rate(lambda: vector_torch.block_checks(data), size, data)
    return f"{ours:.2f} GB/s, a copy within the device {_rate(lambda: other.copy_(data), size, data):.2f} GB/s"


def switch(device_name: str, tensors: int) -> str:
    """From the call to the first answer out of the other slot."""
    with place(device_name, tensors) as here, shm_directory() as directory:
        views = [here.views(slot, here.stage(slot, weights(tensors, slot)))[0] for slot in (0, 1)]
        block = ControlBlock.create(directory / "block.control")
        gate, control = WorkerGate(block, 0), Switch(block)
        given = torch.ones((1, views[0].shape[0]), device=here.memory.device)
        calls, firsts = [], []
        for turn in range(100):
            begin = time.perf_counter()
            report = control.switch(turn % 2)
            slot = gate.enter()
            (given @ views[slot]).cpu()
            firsts.append(1e6 * (time.perf_counter() - begin))
            calls.append(report.call_us)
            gate.leave(slot)
        del gate, control
        block.close()
    return f"call {statistics.median(calls):.1f} us, first answer after {statistics.median(firsts):.1f} us"


def _rate(work: Callable[[], object], size: int, where: torch.Tensor) -> float:
    """GB/s, after one warm-up, until the device has ended."""

    def once() -> float:
        begin = time.perf_counter()
        work()
        if where.is_cuda:
            torch.cuda.synchronize(where.device)
        return size / (time.perf_counter() - begin) / 1e9

    once()
    return statistics.median(once() for _ in range(TURNS))
