"""Memory of a CUDA device, made by the keeper and mapped by those who compute: one allocation, the same bytes in every process.

The keeper creates and exports, and maps nothing. Everybody else takes the descriptor in, reserves addresses, maps, and gets access: control
to write, workers to read only. Whatever was done is undone, backwards, when a later step fails. Sizes are multiples of the granularity.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from node_agent.device.driver import OUT_OF_MEMORY, Driver
from node_agent.device.memory_maker import Memory
from node_agent.device.streamed import DeviceFault
from node_agent.refusal import Refusal


def padded(size: int, granularity: int) -> int:
    """The next multiple of the granularity, at least one."""
    if size < 1 or granularity < 1:
        raise ValueError(f"{size} bytes in steps of {granularity}")
    return -(-size // granularity) * granularity


class CudaMaker:
    """The keeper's memory maker on a device."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def padded(self, size: int) -> int:
        return padded(size, self._driver.granularity)

    def make(self, name: str, size: int) -> Memory:
        driver, subject = self._driver, f"memory {name} on {self._driver.name}"
        try:
            with ExitStack() as undo:
                handle = driver.create(size)
                undo.callback(driver.release, handle)
                descriptor = driver.export(handle)
                undo.pop_all()
        except DeviceFault as cause:
            if cause.name == OUT_OF_MEMORY:
                raise Refusal("no_headroom", subject, f"{size} bytes", f"{cause.call}: {cause.name}") from cause
            raise Refusal("device_failed", subject, "success", f"{cause.call}: {cause.name}") from cause

        def let_go() -> None:
            os.close(descriptor)
            try:
                driver.release(handle)
            except DeviceFault as cause:
                raise Refusal("device_failed", subject, "success", f"{cause.call}: {cause.name}") from cause

        return Memory(descriptor, let_go)


class MappedMemory:
    """Shared memory of a device at addresses of this process."""

    def __init__(self, driver: Driver, descriptor: int, size: int, writable: bool) -> None:
        """`size` is that of the whole allocation. The descriptor stays the caller's. Raises Refusal device_failed."""
        self.size_bytes = size
        self._name = driver.name
        try:
            with ExitStack() as undo:
                handle = driver.take_in(descriptor)
                undo.callback(driver.release, handle)
                self.address = driver.reserve(size)
                undo.callback(driver.give_addresses_back, self.address, size)
                driver.map(self.address, size, handle)
                undo.callback(driver.unmap, self.address, size)
                driver.allow(self.address, size, writable)
                self._undo = undo.pop_all()
        except DeviceFault as cause:
            raise Refusal("device_failed", f"shared memory on {driver.name}", "success", f"{cause.call}: {cause.name}") from cause

    def close(self) -> None:
        """Nothing uses it any more, and no work on it is under way. Raises Refusal device_failed, after everything was tried."""
        try:
            self._undo.close()
        except DeviceFault as cause:
            raise Refusal("device_failed", f"shared memory on {self._name}", "success", f"{cause.call}: {cause.name}") from cause
