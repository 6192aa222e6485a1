"""What a feed of torch makes of torch's errors, and of requests that do not fit it. Its work is held to the contract of the device port."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest

torch = pytest.importorskip("torch")

from consistency.vector import BLOCK_BYTES  # noqa: E402
from node_agent.device.streamed import DeviceFault  # noqa: E402
from node_agent.device.torch_feed import TorchFeed  # noqa: E402

pytestmark = pytest.mark.device


class Broken:
    """A stream of a device that has gone."""

    def use(self) -> AbstractContextManager[object]:
        return nullcontext()

    def done(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")


def test_an_error_of_torch_is_a_fault_of_the_device_with_its_first_line() -> None:
    feed = TorchFeed(torch.zeros(4096, dtype=torch.uint8), BLOCK_BYTES, Broken())
    with pytest.raises(DeviceFault) as caught:
        feed.done()
    assert (caught.value.call, caught.value.name) == ("work", "CUDA error: an illegal memory access was encountered")


def test_a_copy_that_torch_refuses_is_a_fault_of_the_device() -> None:
    feed = TorchFeed(torch.zeros(4096, dtype=torch.uint8), BLOCK_BYTES)
    with pytest.raises(DeviceFault, match="upload: "):
        feed.upload(4000, 200)
    with pytest.raises(DeviceFault, match="move: "):
        feed.move(4000, 0, 200)


def test_more_checks_than_the_feed_has_room_for_are_a_defect() -> None:
    feed = TorchFeed(torch.zeros(3 * BLOCK_BYTES, dtype=torch.uint8), BLOCK_BYTES)
    with pytest.raises(ValueError, match="at most the"):
        feed.checks(0, 2 * BLOCK_BYTES)
