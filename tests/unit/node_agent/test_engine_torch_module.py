"""Versions that describe their module: from a published directory to an answer, and what is refused on the way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("transformers")

from consistency.artifact import build_manifest  # noqa: E402
from node_agent.binding import BindingError, SlotViews  # noqa: E402
from node_agent.device.arena import Arena  # noqa: E402
from node_agent.device.port import SlotRecord  # noqa: E402
from node_agent.engine import known, torch_module  # noqa: E402
from node_agent.engine.port import BadInput, EngineFault, Instance  # noqa: E402
from node_agent.engine.torch_module import TorchModuleEngine  # noqa: E402
from node_agent.host import Host  # noqa: E402
from node_agent.layout import plan  # noqa: E402
from node_agent.loading import Loader  # noqa: E402
from node_agent.messages import Infer, Inferred, Load, Loaded, Prove, Proved, Tensor  # noqa: E402
from node_agent.plan import Order, Target  # noqa: E402
from node_agent.prober import ProbePlaces, Prober  # noqa: E402
from node_agent.serving import Staging  # noqa: E402
from raftmeta.core import manifest as manifests  # noqa: E402
from raftmeta.core.manifest import TensorEntry, tensor_bytes  # noqa: E402
from raftmeta.core.module_description import FILE  # noqa: E402
from tests.support.agent_memory import NodeMemory  # noqa: E402
from tests.support.described_module import CHAIN, chain, write_version  # noqa: E402
from tests.support.small_version import Version  # noqa: E402

X = np.array([[1, 2, 3, 4], [0.5, -1, 0, 2]], "<f4")
NUMPY = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I64": "<i8"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_version(tmp_path / "v1")


@pytest.fixture
def instance(directory: Path, shm: Path) -> Iterator[Instance]:
    yield TorchModuleEngine().load(directory, views_of(directory, shm), ())


def views_of(directory: Path, shm: Path) -> SlotViews:
    """The tensors of the file as a slot holds them."""
    from safetensors.numpy import load_file

    arrays = load_file(directory / "model.safetensors")
    names = {np.dtype(value).str: key for key, value in NUMPY.items()}
    entries = [
        TensorEntry(n, names[a.dtype.str], a.shape, "f", 0, tensor_bytes(names[a.dtype.str], a.shape), "0" * 64, "0" * 64)
        for n, a in arrays.items()
    ]
    layout = plan(entries)
    arena = Arena.create(shm / f"{directory.name}.arena", max(1, layout.total_bytes))
    arena.mark_dirty(0, SlotRecord(version="1"))
    view = arena.staging_view(0)
    for place in layout.placements:
        view[place.offset : place.end] = arrays[place.name].tobytes()
    view.release()
    arena.mark_verified(0, "", "")
    return SlotViews(arena.serving_view(0), layout)


def ask(values: Any = X, name: str = "x", datatype: str = "FP32") -> Tensor:
    return Tensor(name, datatype, values.shape, values.tobytes())


def rows(answer: tuple[Tensor, ...]) -> Any:
    (item,) = answer
    assert isinstance(item.data, bytes) and (item.name, item.datatype) == ("y", "FP32")
    return np.frombuffer(item.data, "<f4").reshape(item.shape)


def by_hand(directory: Path, values: Any) -> Any:
    from safetensors.numpy import load_file

    t = load_file(directory / "model.safetensors")
    hidden = values @ t["first.weight"].T + t["first.bias"]
    hidden = (hidden - t["norm.running_mean"]) / np.sqrt(t["norm.running_var"] + 1e-5) * t["norm.weight"] + t["norm.bias"]
    hidden = torch.nn.functional.gelu(torch.from_numpy(hidden)).numpy() @ t["last.weight"].T
    parts = np.exp(hidden - hidden.max(axis=1, keepdims=True))
    return parts / parts.sum(axis=1, keepdims=True)


def test_the_answer_is_what_the_layers_give_by_hand(instance: Instance, directory: Path) -> None:
    instance.warm()
    np.testing.assert_allclose(rows(instance.infer([ask()], ["y"])), by_hand(directory, X), rtol=1e-5)
    assert [(spec.name, spec.datatype, spec.shape) for spec in (*instance.inputs, *instance.outputs)] == [
        ("x", "FP32", (-1, 4)),
        ("y", "FP32", (-1, 3)),
    ]


def test_every_tensor_of_the_module_is_one_of_the_slot_and_nothing_is_derived(instance: Instance) -> None:
    assert dict(instance.derived) == {}
    instance.check()


def test_a_published_version_is_staged_proved_loaded_and_answers_end_to_end(tmp_path: Path, shm: Path) -> None:
    directory = write_version(tmp_path / "v1")
    manifest = build_manifest(directory, sources=[directory.as_uri() + "/"], engine="torch_module", unbound=[])
    assert (manifest.engine, manifest.unbound) == ("torch_module", ())
    checksum = manifests.checksum(manifests.config_digest(manifest), manifests.weights_digest(manifest))
    memory = NodeMemory(tmp_path / "store", shm)
    version = Version(directory, manifest, Target("encoder", "1.0.0", checksum, manifest.vector_root))
    fetch(memory, version)
    station = memory.station()
    station.make_room(manifest)
    station.stage(Staging(version.target, manifest, 0, Order(1, 1), "", 0))
    loader = Loader(memory.store, known.load(()))
    proved = Prober(ProbePlaces(memory.root, shm, 60.0, "here", 1), loader).prove(Prove(1, "search", 0, "1.0.0", checksum))
    assert isinstance(proved, Proved), proved
    host = Host(0, (memory.root, shm), loader)
    assert isinstance(host.load(Load(1, "search", 0, "1.0.0", checksum)), Loaded)
    station.note_warm(0, "", {})
    station.switch(version.target, 0)
    reply = host.infer(Infer(1, "search", "", (ask(),), ()))
    assert isinstance(reply, Inferred), reply
    assert reply.version == "1.0.0"
    np.testing.assert_allclose(rows(reply.outputs), by_hand(directory, X), rtol=1e-5)
    host.close()
    station.close()


def fetch(memory: NodeMemory, version: Version) -> None:
    """As `NodeMemory.fetch`, from a file of another name."""
    weights = version.directory / "model.safetensors"
    (version.directory / "w.safetensors").write_bytes(weights.read_bytes())
    memory.fetch(version)


def refused(directory: Path, shm: Path) -> str:
    with pytest.raises((BindingError, EngineFault)) as caught:
        TorchModuleEngine().load(directory, views_of(directory, shm), ())
    assert caught.value.kind == "not_bindable"
    return caught.value.detail


def test_a_tensor_that_the_description_does_not_ask_for_is_refused(tmp_path: Path, shm: Path) -> None:
    directory = write_version(tmp_path / "v1", more=torch.ones(3))
    assert "'more': the description asks for none, the version has F32 [3]" in refused(directory, shm)


@pytest.mark.parametrize("name", ["first.bias", "norm.running_var", "norm.num_batches_tracked"])
def test_a_tensor_that_is_missing_is_refused_buffers_included(tmp_path: Path, shm: Path, name: str) -> None:
    directory = write_version(tmp_path / "v1", **{name.replace(".", "__"): None})
    assert f"{name!r}" in refused(directory, shm)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_a_tensor_of_another_dtype_or_shape_is_refused(tmp_path: Path, shm: Path, dtype: str) -> None:
    directory = write_version(tmp_path / "v1", first__weight=torch.ones((6, 4), dtype=getattr(torch, dtype)))
    assert "asks for F32 [6, 4]" in refused(directory, shm)
    other = write_version(tmp_path / "v2", last__weight=torch.ones((3, 7)))
    assert "the version has F32 [3, 7]" in refused(other, shm)


def test_a_buffer_that_nothing_fills_is_refused_as_left_on_meta(directory: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(torch.nn.GELU):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(6), persistent=False)

    monkeypatch.setitem(torch_module.BUILDERS, "GELU", Scaled)
    with pytest.raises(BindingError) as caught:
        TorchModuleEngine().load(directory, views_of(directory, shm), ())
    assert caught.value.kind == "left_on_meta" and "act.scale" in caught.value.detail


def test_tensors_declared_unbound_are_refused(directory: Path, shm: Path) -> None:
    with pytest.raises(BindingError, match="uncovered_tensor"):
        TorchModuleEngine().load(directory, views_of(directory, shm), ("first.bias",))


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"format": 1, "format": 2}', json.dumps(chain(layers=[{"name": "a", "type": "eval"}])), "[" * 50 + "]" * 50]
)
def test_a_description_that_cannot_be_read_is_refused(directory: Path, shm: Path, text: str) -> None:
    (directory / FILE).write_text(text)
    assert refused(directory, shm)


def test_a_description_that_is_missing_or_too_large_is_refused(directory: Path, shm: Path) -> None:
    (directory / FILE).write_text(json.dumps(CHAIN) + " " * (256 << 10))
    views = views_of(directory, shm)
    for reason in ("the limit is", "No such file"):
        with pytest.raises(EngineFault, match=reason) as caught:
            TorchModuleEngine().load(directory, views, ())
        assert caught.value.kind == "not_bindable"
        (directory / FILE).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("inputs", "outputs", "reason"),
    [
        ([], [], "found nothing"),
        ([ask(name="z")], [], "takes x alone, found z"),
        ([ask(), ask()], [], "takes x alone"),
        ([ask(X.astype("<f8"), datatype="FP64")], [], "expected FP32"),
        ([ask(X[:, :3].copy())], [], "expected FP32 of shape [-1, 4]"),
        ([ask(X[:0])], [], "0 rows"),
        ([ask(np.zeros((257, 4), "<f4"))], [], "257 rows, this model takes 1..256"),
        ([Tensor("x", "FP32", (), bytes(4))], [], "expected FP32"),
        ([ask()], ["z"], "output 'z' is unknown"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_before_torch_sees_them(
    instance: Instance, inputs: list[Tensor], outputs: list[str], reason: str
) -> None:
    with pytest.raises(BadInput) as caught:
        instance.infer(inputs, outputs)
    assert reason in str(caught.value)


def test_ids_outside_the_embedding_are_refused_and_those_inside_are_looked_up(tmp_path: Path, shm: Path) -> None:
    layers = [{"name": "words", "type": "Embedding", "num_embeddings": 10, "embedding_dim": 2}]
    description = chain(input={"name": "ids", "datatype": "INT64", "row": [3]}, layers=layers)
    directory = write_version(tmp_path / "v1", description=description, words__weight=torch.arange(20, dtype=torch.float32).reshape(10, 2))
    made = TorchModuleEngine().load(directory, views_of(directory, shm), ())
    made.warm()
    found = rows(made.infer([ask(np.array([[0, 9, 1]], "<i8"), "ids", "INT64")], ()))
    assert found.tolist() == [[[0, 1], [18, 19], [2, 3]]]
    for wrong in (-1, 10):
        with pytest.raises(BadInput, match=r"values lie in \[0, 10\)"):
            made.infer([ask(np.array([[0, wrong, 1]], "<i8"), "ids", "INT64")], ())


def test_what_is_not_finite_is_no_answer_and_fails_the_warm_up(tmp_path: Path, shm: Path) -> None:
    directory = write_version(tmp_path / "v1", last__weight=torch.full((3, 6), float("nan")))
    made = TorchModuleEngine().load(directory, views_of(directory, shm), ())
    with pytest.raises(EngineFault) as caught:
        made.infer([ask()], ())
    assert caught.value.kind == "engine_failed" and "not finite" in caught.value.detail
    with pytest.raises(EngineFault) as caught:
        made.warm()
    assert caught.value.kind == "warmup_failed"


def test_rows_are_bounded_by_the_widest_place_of_the_chain(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_module, "MAX_VALUES", 12)
    made = TorchModuleEngine().load(write_version(tmp_path / "v1"), views_of(tmp_path / "v1", shm), ())
    assert rows(made.infer([ask()], ())).shape == (2, 3)
    with pytest.raises(BadInput, match=r"3 rows, this model takes 1\.\.2"):
        made.infer([ask(np.zeros((3, 4), "<f4"))], ())


def test_half_precision_is_computed_as_such_and_answered_as_floats(tmp_path: Path, shm: Path) -> None:
    description = chain(dtype="F16", layers=[{"name": "a", "type": "Linear", "in_features": 4, "out_features": 2, "bias": False}])
    weights = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 1]], dtype=torch.float16)
    directory = write_version(tmp_path / "v1", description=description, a__weight=weights)
    made = TorchModuleEngine().load(directory, views_of(directory, shm), ())
    assert rows(made.infer([ask()], ())).tolist() == [[1, 4], [0.5, 2]]


def test_publishing_refuses_a_description_that_does_not_fit_its_tensors(tmp_path: Path) -> None:
    from raftmeta.core.errors import RaftmetaError

    for name, reason in (("broken", "is missing"), ("other", "does not fit the tensors")):
        directory = write_version(tmp_path / name, first__bias=torch.ones(7))
        if name == "broken":
            (directory / FILE).unlink()
        with pytest.raises(RaftmetaError, match=reason):
            build_manifest(directory, sources=[directory.as_uri() + "/"], engine="torch_module", unbound=[])
