"""The part of the CUDA driver's interface that shared memory needs, called through ctypes, every call checked.

A call that does not succeed raises DeviceFault with the driver's own name for the error. What the machine lacks (the library, a device, a
driver that can share memory by descriptor) is a Refusal no_device at the start, with what was looked for. No torch here: the keeper uses
this and stays small. Figures are those of cuda.h; the signatures stand in one table.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any, Final

from node_agent.device.streamed import DeviceFault
from node_agent.refusal import Refusal

LIBRARY: Final = "libcuda.so.1"
MIN_VERSION: Final = 10_020  # 10.2: the first with memory that is shared by descriptor
OUT_OF_MEMORY: Final = "CUDA_ERROR_OUT_OF_MEMORY"
DEVICE: Final = re.compile(r"cuda:(0|[1-9][0-9]?)\Z")

_PINNED: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_DESCRIPTOR: Final = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_READ: Final = 1  # CU_MEM_ACCESS_FLAGS_PROT_READ
_RECOMMENDED: Final = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
_MAPS_MEMORY: Final = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_SHARES_BY_DESCRIPTOR: Final = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp; the last eight bytes are its allocFlags, all off."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("windows_only", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


_INT, _U64, _SIZE = ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t
_OUT_INT, _OUT_U64, _OUT_SIZE = ctypes.POINTER(_INT), ctypes.POINTER(_U64), ctypes.POINTER(_SIZE)
_PROPERTIES = ctypes.POINTER(AllocationProperties)
SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDriverGetVersion": (_OUT_INT,),
    "cuDeviceGetCount": (_OUT_INT,),
    "cuDeviceGetAttribute": (_OUT_INT, _INT, _INT),
    "cuGetErrorName": (_INT, ctypes.POINTER(ctypes.c_char_p)),
    "cuMemGetAllocationGranularity": (_OUT_SIZE, _PROPERTIES, _INT),
    "cuMemCreate": (_OUT_U64, _SIZE, _PROPERTIES, _U64),
    "cuMemRelease": (_U64,),
    "cuMemExportToShareableHandle": (_OUT_INT, _U64, _INT, _U64),
    "cuMemImportFromShareableHandle": (_OUT_U64, ctypes.c_void_p, _INT),
    "cuMemAddressReserve": (_OUT_U64, _SIZE, _SIZE, _U64, _U64),
    "cuMemAddressFree": (_U64, _SIZE),
    "cuMemMap": (_U64, _SIZE, _SIZE, _U64, _U64),
    "cuMemUnmap": (_U64, _SIZE),
    "cuMemSetAccess": (_U64, _SIZE, ctypes.POINTER(Access), _SIZE),
}

Find = Callable[[str, Any], Any]  # name, prototype -> the function. Raises AttributeError when there is none


def library(name: str = LIBRARY) -> Find:
    """The driver of this machine; of another name in tests alone. Raises Refusal no_device when there is none."""
    try:
        loaded = ctypes.CDLL(name)
    except OSError as cause:
        raise Refusal("no_device", "CUDA driver", name, str(cause)) from cause
    return lambda function, prototype: prototype((function, loaded))


class Driver:
    """One device through the driver. `name` is `cuda:N`."""

    def __init__(self, name: str, find: Find | None = None) -> None:
        """Raises Refusal no_device with what is missing."""
        parsed = DEVICE.match(name)
        if parsed is None:
            raise Refusal("no_device", "device", "cuda:N", repr(name[:80]))
        self.name = name
        self.ordinal = int(parsed[1])
        self._functions = _bound(library() if find is None else find)
        try:
            self._require_device()
            self.granularity = self._granularity()  # of the sizes of allocations
        except DeviceFault as cause:
            raise Refusal("no_device", self.name, "a CUDA driver that starts", f"{cause.call}: {cause.name}") from cause

    def create(self, size: int) -> int:
        """The handle of new memory on the device; a multiple of the granularity."""
        handle = _U64()
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties()), 0)
        return handle.value

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def export(self, handle: int) -> int:
        """A descriptor of the memory, this process's to close."""
        descriptor = _INT(-1)
        self._call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _DESCRIPTOR, 0)
        return descriptor.value

    def take_in(self, descriptor: int) -> int:
        """The handle of memory that another process shares; the descriptor stays the caller's."""
        handle = _U64()
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), descriptor, _DESCRIPTOR)
        return handle.value

    def reserve(self, size: int) -> int:
        """Addresses, with nothing behind them yet."""
        address = _U64()
        self._call("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
        return address.value

    def give_addresses_back(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", address, size)

    def map(self, address: int, size: int, handle: int) -> None:
        self._call("cuMemMap", address, size, 0, handle, 0)

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)

    def allow(self, address: int, size: int, writable: bool) -> None:
        """From now on kernels and copies of this process may read it, or write to it too."""
        access = Access(Location(_ON_DEVICE, self.ordinal), _READ_WRITE if writable else _READ)
        self._call("cuMemSetAccess", address, size, ctypes.byref(access), 1)

    def _properties(self) -> AllocationProperties:
        return AllocationProperties(_PINNED, _DESCRIPTOR, Location(_ON_DEVICE, self.ordinal))

    def _require_device(self) -> None:
        self._call("cuInit", 0)
        version, devices = self._number("cuDriverGetVersion"), self._number("cuDeviceGetCount")
        if version < MIN_VERSION:
            raise Refusal("no_device", f"CUDA driver of {self.name}", f"interface {_dotted(MIN_VERSION)} or later", _dotted(version))
        if self.ordinal >= devices:
            raise Refusal("no_device", self.name, f"one of the {devices} devices of this machine", f"number {self.ordinal}")
        for attribute, what in ((_MAPS_MEMORY, "mapped memory"), (_SHARES_BY_DESCRIPTOR, "memory shared by descriptor")):
            found = _INT()
            self._call("cuDeviceGetAttribute", ctypes.byref(found), attribute, self.ordinal)
            if not found.value:
                raise Refusal("no_device", self.name, f"a device with {what}", "one without")

    def _granularity(self) -> int:
        found = _SIZE()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(self._properties()), _RECOMMENDED)
        return found.value

    def _number(self, name: str) -> int:
        found = _INT()
        self._call(name, ctypes.byref(found))
        return found.value

    def _call(self, name: str, *arguments: object) -> None:
        result = self._functions[name](*arguments)
        if result:
            raise DeviceFault(name, self._error_name(result))

    def _error_name(self, result: int) -> str:
        found = ctypes.c_char_p()
        unknown = self._functions["cuGetErrorName"](result, ctypes.byref(found)) or found.value is None
        return f"error {result}" if unknown or found.value is None else found.value.decode("ascii", "replace")


def _bound(find: Find) -> dict[str, Any]:
    functions = {}
    for name, types in SIGNATURES.items():
        try:
            functions[name] = find(name, ctypes.CFUNCTYPE(_INT, *types))
        except AttributeError as cause:
            expected = f"{name}, which interface {_dotted(MIN_VERSION)} has"
            raise Refusal("no_device", "CUDA driver", expected, "a driver without it: too old") from cause
    return functions


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
