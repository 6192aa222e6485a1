"""The driver's functions behind their real C signatures, with a host's memory behind its handles: what ctypes passes is what would arrive.

Descriptors are memfds, so they can be sent to another process. A step out of order, a size off the granularity or a name that fails by
order ends with the driver's own error number.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

GRANULARITY = 2 << 20
INVALID_VALUE, OUT_OF_MEMORY, NO_DEVICE, ILLEGAL = 1, 2, 100, 700
NAMES = {1: b"CUDA_ERROR_INVALID_VALUE", 2: b"CUDA_ERROR_OUT_OF_MEMORY", 100: b"CUDA_ERROR_NO_DEVICE", 700: b"CUDA_ERROR_ILLEGAL_ADDRESS"}


class FakeLibcuda:
    def __init__(self, memory_bytes: int = 16 * GRANULARITY, version: int = 12_040, devices: int = 2) -> None:
        self.memory_bytes, self.version, self.devices = memory_bytes, version, devices
        self.attributes = {102: 1, 103: 1}
        self.fails: dict[str, int] = {}  # name -> the error it ends with
        self.missing: set[str] = set()
        self.handles: dict[int, int] = {}  # handle -> size
        self.shared: dict[int, int] = {}  # inode of a descriptor -> size
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}  # address -> handle
        self.access: dict[int, tuple[int, int]] = {}  # address -> device, flags
        self.properties: list[tuple[int, int, int, int]] = []
        self._next = 1 << 32

    def find(self, name: str, prototype: Any) -> Any:
        if name in self.missing:
            raise AttributeError(name)
        work: Callable[..., int] = getattr(self, f"_{name}")

        def called(*arguments: Any) -> int:
            return self.fails.get(name) or work(*arguments)

        return prototype(called)

    @property
    def is_clean(self) -> bool:
        return not (self.handles or self.reserved or self.mapped)

    def _new(self) -> int:
        self._next += 1 << 32  # beyond 32 bits, so that a signature that is too narrow shows
        return self._next

    def _cuInit(self, flags: int) -> int:
        return 0 if self.devices else NO_DEVICE

    def _cuDriverGetVersion(self, out: Any) -> int:
        out[0] = self.version
        return 0

    def _cuDeviceGetCount(self, out: Any) -> int:
        out[0] = self.devices
        return 0

    def _cuDeviceGetAttribute(self, out: Any, attribute: int, device: int) -> int:
        out[0] = self.attributes[attribute]
        return 0 if 0 <= device < self.devices else INVALID_VALUE

    def _cuGetErrorName(self, error: int, out: Any) -> int:
        if error not in NAMES:
            return INVALID_VALUE
        out[0] = NAMES[error]
        return 0

    def _cuMemGetAllocationGranularity(self, out: Any, properties: Any, option: int) -> int:
        out[0] = GRANULARITY
        return 0 if option == 1 else INVALID_VALUE

    def _cuMemCreate(self, out: Any, size: int, properties: Any, flags: int) -> int:
        given = properties[0]
        self.properties.append((given.type, given.handle_types, given.location.type, given.location.id))
        if size % GRANULARITY or flags or given.windows_only or any(given.flags):
            return INVALID_VALUE
        if sum(self.handles.values()) + size > self.memory_bytes:
            return OUT_OF_MEMORY
        out[0] = self._new()
        self.handles[out[0]] = size
        return 0

    def _cuMemRelease(self, handle: int) -> int:
        return 0 if self.handles.pop(handle, None) is not None else INVALID_VALUE

    def _cuMemExportToShareableHandle(self, out: Any, handle: int, kind: int, flags: int) -> int:
        if handle not in self.handles or kind != 1 or flags:
            return INVALID_VALUE
        out[0] = os.memfd_create("fake-cuda", os.MFD_CLOEXEC)
        self.shared[os.fstat(out[0]).st_ino] = self.handles[handle]
        return 0

    def _cuMemImportFromShareableHandle(self, out: Any, descriptor: int | None, kind: int) -> int:
        size = self.shared.get(os.fstat(descriptor or 0).st_ino)
        if size is None or kind != 1:
            return INVALID_VALUE
        out[0] = self._new()
        self.handles[out[0]] = size
        return 0

    def _cuMemAddressReserve(self, out: Any, size: int, alignment: int, address: int, flags: int) -> int:
        if size % GRANULARITY:
            return INVALID_VALUE
        out[0] = self._new()
        self.reserved[out[0]] = size
        return 0

    def _cuMemAddressFree(self, address: int, size: int) -> int:
        if address in self.mapped or self.reserved.get(address) != size:
            return INVALID_VALUE
        del self.reserved[address]
        return 0

    def _cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> int:
        if self.reserved.get(address) != size or self.handles.get(handle) != size or offset or flags:
            return INVALID_VALUE
        self.mapped[address] = handle
        return 0

    def _cuMemUnmap(self, address: int, size: int) -> int:
        if self.reserved.get(address) != size or self.mapped.pop(address, None) is None:
            return INVALID_VALUE
        self.access.pop(address, None)
        return 0

    def _cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> int:
        if address not in self.mapped or self.reserved[address] != size or count != 1:
            return INVALID_VALUE
        given = access[0]
        self.access[address] = (given.location.id, given.flags)
        return 0


assert ctypes.sizeof(ctypes.c_void_p) == 8, "handles and addresses have 64 bits"
