"""A CUDA device behind the device port: the keeper's memory, mapped here, with feeds of torch. Unproven on a device.

Put together by hand in the order in which it depends on each other; undone in reverse. Records of the slots stay in shared memory of the
host. Control alone opens a device so; a worker maps the same memory read-only (`MappedMemory`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch

from consistency import vector_torch
from node_agent.device.arena import Arena
from node_agent.device.cuda_memory import MappedMemory
from node_agent.device.driver import Driver
from node_agent.device.keeper_client import KeeperClient
from node_agent.device.kept_memory import attach, slot_bytes_of
from node_agent.device.streamed import DeviceFault, StreamedDevice
from node_agent.device.torch_feed import TorchFeed, named, tensor_at
from node_agent.refusal import Refusal

FEEDS: Final = 3  # two threads that stage, and a check of what serves


class Opened(NamedTuple):
    device: StreamedDevice
    memory: torch.Tensor  # both slots, as bytes


@contextmanager
def opened(driver: Driver, records: Arena, keeper: KeeperClient, slot_bytes: int) -> Iterator[Opened]:
    """The device with slots of at least this size, while within.

    Raises Refusal, and RaftmetaError integrity when the device computes the vector wrongly.
    """
    device = torch.device(driver.name)
    if not torch.cuda.is_available():
        raise Refusal("no_device", driver.name, "a build of torch for CUDA", f"torch {torch.__version__}")
    with _refused(driver.name), named("context"):
        torch.zeros(1, device=device)  # makes the context that mapping and access belong to
        vector_torch.require(device)
    held = attach(records, keeper, slot_bytes)
    try:
        mapped = MappedMemory(driver, held.descriptor, held.size_bytes, writable=True)
    finally:
        os.close(held.descriptor)
    try:
        with _refused(driver.name):
            memory = tensor_at(mapped.address, mapped.size_bytes, device)
            feeds = [TorchFeed(memory) for _ in range(FEEDS)]
        yield Opened(StreamedDevice(driver.name, records, slot_bytes_of(held.size_bytes), feeds), memory)
    finally:
        mapped.close()


@contextmanager
def _refused(name: str) -> Iterator[None]:
    try:
        yield
    except DeviceFault as cause:
        raise Refusal("device_failed", f"{cause.call} on {name}", "success", cause.name) from cause
