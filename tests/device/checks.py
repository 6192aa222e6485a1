"""What a run on a device checks. Each function raises when it does not hold, and says in a few words what it saw when it does."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from consistency import vector, vector_torch
from consistency.vector import BLOCK_BYTES
from node_agent.device.driver import Driver
from node_agent.graphs import GraphFault, Graphs, GraphVerdict, Switched
from node_agent.messages import Tensor
from raftmeta.core.probes import Probe, ProbeTensor
from tests.device.places import COLUMNS, keeper, place, weights
from tests.device.steps import Skipped

ROOT = Path(__file__).resolve().parents[2]
SIZES = (0, 1, 8, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 13, vector_torch.PIECE_BYTES + BLOCK_BYTES + 9)
WRITER = """
import os, sys, torch
from pathlib import Path
from node_agent.device.cuda_memory import MappedMemory
from node_agent.device.driver import Driver
from node_agent.device.keeper_client import KeeperClient
from node_agent.device.torch_feed import tensor_at
driver, size = Driver(sys.argv[2]), int(sys.argv[3])
device = torch.device(driver.name)
torch.zeros(1, device=device)
held = KeeperClient(Path(sys.argv[1])).hold("killed", size)
mapped = MappedMemory(driver, held.descriptor, held.size_bytes, sys.argv[4] == "write")
memory = tensor_at(mapped.address, mapped.size_bytes, device)
if sys.argv[4] == "write":
    memory.fill_(77)
    torch.cuda.synchronize()
print(int((memory == 77).all()), int(held.created), flush=True)
sys.stdin.read()
"""


def vectors(device_name: str) -> str:
    device = torch.device(device_name)
    vector_torch.require(device)
    for size in SIZES:
        data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        expected = vector.block_checks(data, vector.backend("numpy"))
        assert np.array_equal(expected, vector.block_checks(data, vector.backend("numba"))), size
        assert np.array_equal(expected, vector_torch.block_checks(torch.from_numpy(data).to(device))), size
    return f"numpy, numba and torch on {device_name} agree over {len(SIZES)} sizes"


def suite(paths: Sequence[str], timeout_s: float, *more: str) -> str:
    """Tests of the suite in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths, *more]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False, env=dict(os.environ, COLUMNS="200")
    )
    last = done.stdout.strip().splitlines()[-1:] or [done.stderr.strip()[-200:]]
    assert done.returncode == 0, f"{' '.join(paths)}: {last[0]}\n{done.stdout[-4000:]}"
    return f"{' '.join(paths)}: passed"


def memory_outlives_a_kill(device_name: str) -> str:
    """A writer on the device is killed; the next process finds its bytes, and maps them read-only."""
    size = 64 << 20
    with keeper(device_name) as client:
        said = []
        for manner in ("write", "read"):
            command = [sys.executable, "-c", WRITER, str(client.path), device_name, str(size), manner]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            said.append(process.stdout.readline().strip())
            process.send_signal(signal.SIGKILL)
            process.communicate()
        assert said == ["1 1", "1 0"], said
        assert client.release("killed") and not client.list().held
    return f"{size >> 20} MiB written by a killed process were whole for the next one"


def memory_of_the_host_outlives_a_kill() -> str:
    with keeper("cpu") as client:
        held = client.hold("rehearsal", mmap.PAGESIZE)
        with mmap.mmap(held.descriptor, mmap.PAGESIZE) as mapped:
            mapped[:5] = b"bytes"
        os.close(held.descriptor)
        again = client.open("rehearsal")
        assert again is not None and os.pread(again.descriptor, 5, 0) == b"bytes"
        os.close(again.descriptor)
    return "a keeper of host memory keeps bytes that nobody maps"


def staging_and_switch(device_name: str, tensors: int) -> str:
    """Three versions through both slots; modules over either slot answer as the same matrices of the host do."""
    versions = [weights(tensors, 1)]
    versions += [weights(tensors, seed, versions[0]) for seed in (2, 3)]
    with place(device_name, tensors) as here:
        for turn, version in enumerate(versions):
            slot = turn % 2
            staged = here.stage(slot, version)
            expected = np.ones((1, COLUMNS), np.float32)
            found = torch.ones((1, COLUMNS), device=here.memory.device)
            for (_, shape, data), view in zip((version[name] for name in sorted(version)), here.views(slot, staged), strict=True):
                assert view.cpu().numpy().tobytes() == data, "the bytes of the slot are those of the version"
                expected, found = expected @ np.frombuffer(data, np.float32).reshape(shape), found @ view
            assert np.allclose(found.cpu().numpy(), expected, rtol=1e-2, atol=1e-3), "answers from the slot"
            here.records.verified(slot)
        return f"{len(versions)} versions of {tensors} matrices, the last one with {staged.counters.bytes_kept >> 20} MiB kept"


class ChainGraph:
    """A chain of matrices of one slot, as a module would compute it, and the same captured."""

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self._views = views
        self._input = torch.zeros((1, COLUMNS), device=views[0].device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output = self._input

    def eager(self, inputs: Sequence[Tensor], outputs: Sequence[str]) -> Sequence[Tensor]:
        return self._answer(self._chain(self._given(inputs)))

    def replay(self, inputs: Sequence[Tensor], outputs: Sequence[str]) -> Sequence[Tensor]:
        try:
            if self._graph is None:
                self._capture()
            assert self._graph is not None
            self._input.copy_(self._given(inputs))
            self._graph.replay()
        except RuntimeError as cause:
            raise GraphFault(str(cause).partition("\n")[0]) from cause
        return self._answer(self._output)

    def _capture(self) -> None:
        side = torch.cuda.Stream()  # libraries make their workspaces before the capture
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._chain(self._input)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = self._chain(self._input)

    def _chain(self, value: torch.Tensor) -> torch.Tensor:
        for view in self._views:
            value = value @ view
        return value

    def _given(self, inputs: Sequence[Tensor]) -> torch.Tensor:
        assert isinstance(inputs[0].data, bytes)
        return torch.from_numpy(np.frombuffer(inputs[0].data, "<f4").copy()).view(1, COLUMNS).to(self._input.device)

    def _answer(self, value: torch.Tensor) -> Sequence[Tensor]:
        return [Tensor("y", "FP32", (1, COLUMNS), value.cpu().numpy().tobytes())]


def graphs(device_name: str, tensors: int) -> str:
    """One capture per slot; after other bytes came into the same layout, the same graph still answers as the module does."""
    if device_name == "cpu":
        raise Skipped("graphs are captured on a CUDA device only, and there is none")
    told: list[GraphVerdict] = []
    policy, asked = Graphs(told.append), probe()
    with place(device_name, tensors) as here:
        first = here.stage(0, weights(tensors, 1))
        runner = ChainGraph(here.views(0, first))
        assert policy.switched(Switched("d", "a" * 64, [asked], ["F32"]), runner).on, told
        here.stage(1, weights(tensors, 2))
        again = here.stage(0, weights(tensors, 3))
        assert again.layout.digest == first.layout.digest, "an unchanged layout keeps every address"
        assert policy.switched(Switched("d", "a" * 64, [asked], ["F32"]), runner).on, told
    return "replay equals eager before and after other bytes in the same layout"


def probe() -> Probe:
    made = ProbeTensor("x", "FP32", (1, COLUMNS), np.ones((1, COLUMNS), "<f4").tobytes())
    return Probe("ones", "close", (made,), (ProbeTensor("y", "FP32", (1, COLUMNS), bytes(4 * COLUMNS)),))


def machine(device_name: str) -> str:
    driver = Driver(device_name)
    return f"{torch.cuda.get_device_name(driver.ordinal)}, torch {torch.__version__}, memory in steps of {driver.granularity >> 10} KiB"
