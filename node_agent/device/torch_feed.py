"""A feed made of torch: pinned memory, a stream of the device, and the vector's torch backend. The same code for a tensor of the host.

The tensor is the device's memory of both slots; torch neither owns nor frees it. Torch's errors become DeviceFault with their first line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, Protocol, cast

import torch
from torch import Tensor

from consistency import vector_torch
from consistency.vector import BLOCK_BYTES, Words
from node_agent.device.streamed import DeviceFault

BUFFER_BYTES: Final = 16 << 20  # a piece of the vector's backend, and a copy of a third of a millisecond over PCIe 5


class Stream(Protocol):
    def use(self) -> AbstractContextManager[object]:
        """What is asked within it goes to this stream."""

    def done(self) -> bool: ...


class CudaStream:
    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def use(self) -> AbstractContextManager[object]:
        return cast(AbstractContextManager[object], torch.cuda.stream(self._stream))

    def done(self) -> bool:
        return bool(self._stream.query())


class HostStream:
    """Work of the host has happened when the call returns."""

    def use(self) -> AbstractContextManager[object]:
        return nullcontext()

    def done(self) -> bool:
        return True


class TorchFeed:
    def __init__(self, memory: Tensor, buffer_bytes: int = BUFFER_BYTES, stream: Stream | None = None) -> None:
        on_device = memory.device.type == "cuda"
        self._memory = memory
        self._stream = stream or (CudaStream(memory.device) if on_device else HostStream())
        with named("pinned memory"):
            self._buffer = torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=on_device)
            self._results = torch.empty((-(-buffer_bytes // BLOCK_BYTES), 2), dtype=torch.int64, pin_memory=on_device)
        self.buffer = memoryview(self._buffer.numpy().data)

    def upload(self, offset: int, size: int) -> None:
        with self._asked("upload"):
            self._memory[offset : offset + size].copy_(self._buffer[:size], non_blocking=True)

    def move(self, from_offset: int, to_offset: int, size: int) -> None:
        with self._asked("move"):
            self._memory[to_offset : to_offset + size].copy_(self._memory[from_offset : from_offset + size], non_blocking=True)

    def checks(self, offset: int, size: int) -> Words:
        with self._asked("checks"):
            sums = vector_torch.enqueue(self._memory[offset : offset + size])
            if len(sums) > len(self._results):
                raise ValueError(f"{size} bytes at once, expected at most the {self._buffer.numel()} of the buffer")
            results = self._results[: len(sums)]
            results.copy_(sums, non_blocking=True)
        return vector_torch.unsigned(results)

    def done(self) -> bool:
        with named("work"):
            return self._stream.done()

    @contextmanager
    def _asked(self, call: str) -> Iterator[None]:
        with named(call), self._stream.use():
            yield


class _Interface:
    """Memory at an address of the device, in the form that torch takes without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}


def tensor_at(address: int, size: int, device: torch.device) -> Tensor:
    """These bytes of the device as a tensor; whoever mapped them keeps them mapped."""
    with named("tensor over mapped memory"):
        made = torch.as_tensor(_Interface(address, size), device=device)
    if made.data_ptr() != address:
        raise DeviceFault("tensor over mapped memory", "torch made a copy")
    return made


@contextmanager
def named(call: str) -> Iterator[None]:
    """Torch's errors within it are faults of the device in this call."""
    try:
        yield
    except RuntimeError as cause:  # what torch raises for every error of a device
        raise DeviceFault(call, str(cause).partition("\n")[0]) from cause
