"""What opening a CUDA device does on a machine whose torch has none: it refuses before it asks anybody for memory."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from node_agent.device.arena import Arena  # noqa: E402
from node_agent.device.cuda import opened  # noqa: E402
from node_agent.device.driver import Driver  # noqa: E402
from node_agent.device.port import SlotRecord, SlotState  # noqa: E402
from node_agent.refusal import Refusal  # noqa: E402
from tests.support.fake_libcuda import FakeLibcuda  # noqa: E402
from tests.support.keeping import keeping  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.skipif(torch.cuda.is_available(), reason="torch knows a device here")]


def test_a_torch_without_cuda_is_refused_before_memory_is_asked_for_and_records_stay(tmp_path: Path) -> None:
    records, cuda = Arena.create(tmp_path / "arena", 1), FakeLibcuda()
    records.mark_dirty(0, SlotRecord())
    with keeping(tmp_path / "k.sock") as keeper:
        with (
            pytest.raises(Refusal, match=r"no_device.*a build of torch for CUDA"),
            opened(Driver("cuda:0", cuda.find), records, keeper, 4096),
        ):
            pytest.fail("it opened")
        assert keeper.list().held == ()
    assert cuda.is_clean and records.record(0).state is SlotState.DIRTY
    records.close()
