"""The Hugging Face engine over an arena: answers equal the library's own, and inputs beyond the model's limits are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from consistency.artifact import build_manifest  # noqa: E402
from node_agent.binding import BindingError, SlotViews  # noqa: E402
from node_agent.device.arena import Arena  # noqa: E402
from node_agent.device.port import SlotRecord  # noqa: E402
from node_agent.engine.hf import HfEngine, HfInstance, pool  # noqa: E402
from node_agent.engine.port import BadInput, EngineFault  # noqa: E402
from node_agent.engine.sentence import SentenceConfig  # noqa: E402
from node_agent.layout import plan  # noqa: E402
from node_agent.messages import Tensor  # noqa: E402
from raftmeta.core.manifest import Manifest  # noqa: E402
from tests.support.shm import shm_directory  # noqa: E402
from tests.support.tiny_encoder import write_encoder  # noqa: E402

TEXTS = ("hello world", "one two three model zone")


def bound_views(directory: Path, arena_dir: Path) -> tuple[SlotViews, Manifest]:
    manifest = build_manifest(directory, sources=[directory.as_uri() + "/"], engine="hf", unbound=[])
    layout = plan(manifest.tensors)
    arena = Arena.create(arena_dir / f"{directory.name}.arena", layout.total_bytes)
    arena.mark_dirty(0, SlotRecord(version="1"))
    weights = (directory / "model.safetensors").read_bytes()
    view = arena.staging_view(0)
    for place, tensor in zip(layout.placements, manifest.tensors, strict=True):
        view[place.offset : place.end] = weights[tensor.begin : tensor.end]
    view.release()
    arena.mark_verified(0, "", "")
    return SlotViews(arena.serving_view(0), layout), manifest


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("hf") / "v1", seed=1)


@pytest.fixture(scope="module")
def instance(directory: Path) -> Iterator[HfInstance]:
    with shm_directory() as shm:
        views, manifest = bound_views(directory, shm)
        made = HfEngine().load(directory, views, manifest.unbound)
        assert isinstance(made, HfInstance)
        yield made


def text(*texts: str) -> Tensor:
    return Tensor("text", "BYTES", (len(texts),), texts)


def ids(rows: list[list[int]], name: str = "input_ids") -> Tensor:
    array = np.array(rows, "<i8")
    return Tensor(name, "INT64", array.shape, array.tobytes())


def values(item: Tensor) -> Any:
    assert isinstance(item.data, bytes)
    return np.frombuffer(item.data, "<f4").reshape(item.shape)


def library_answer(directory: Path, texts: tuple[str, ...]) -> Any:
    """The same model loaded from its file by the library itself, pooled by hand."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModel.from_pretrained(directory).eval()
    encoded = tokenizer(list(texts), padding=True, truncation=True, max_length=64, return_tensors="pt")
    with torch.inference_mode():
        states = model(**encoded).last_hidden_state
    mask = encoded["attention_mask"].unsqueeze(-1).float()
    mean = (states * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean, dim=1).numpy(), states.numpy()


def test_embeddings_of_texts_equal_the_librarys(instance: HfInstance, directory: Path) -> None:
    (found,) = instance.infer((text(*TEXTS),), ())
    assert (found.name, found.datatype, found.shape) == ("embedding", "FP32", (2, 32))
    np.testing.assert_allclose(values(found), library_answer(directory, TEXTS)[0], atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(values(found), axis=1), 1.0, atol=1e-5)


def test_token_ids_give_token_states_and_the_same_embedding(instance: HfInstance, directory: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    encoded = tokenizer(list(TEXTS), padding=True)
    inputs = tuple(ids(encoded[name], name) for name in ("input_ids", "attention_mask"))
    by_name = {item.name: item for item in instance.infer(inputs, ())}
    expected, states = library_answer(directory, TEXTS)
    np.testing.assert_allclose(values(by_name["embedding"]), expected, atol=1e-6)
    np.testing.assert_allclose(values(by_name["last_hidden_state"]), states, atol=1e-5)


def test_only_the_outputs_that_were_asked_for_come_back(instance: HfInstance) -> None:
    found = instance.infer((text("hello"),), ("last_hidden_state",))
    assert [item.name for item in found] == ["last_hidden_state"]


def test_padding_does_not_change_an_embedding(instance: HfInstance) -> None:
    (together,) = instance.infer((text(*TEXTS),), ())
    (alone,) = instance.infer((text(TEXTS[0]),), ())
    np.testing.assert_allclose(values(together)[0], values(alone)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("inputs", "outputs", "says"),
    [
        ((), (), "input_ids is missing"),
        ((text("a"),), ("logits",), "output 'logits' is unknown"),
        ((text("a"), ids([[1]])), (), "text comes alone"),
        ((ids([[1]]), ids([[1]], "position")), (), "input 'position' is unknown"),
        ((ids([[1, 99]]),), (), r"values lie in \[0, 20\)|values lie in"),
        ((ids([[-1]]),), (), "values lie in"),
        ((ids([[1] * 65]),), (), "64 tokens a row"),
        ((ids([[1]] * 257),), (), "256 rows"),
        ((ids([[1, 2]]), ids([[1]], "attention_mask")), (), "expected the shape of input_ids"),
        ((ids([[1, 2]]), ids([[0, 0]], "attention_mask")), (), "attends to nothing"),
        ((ids([[1, 2]]), ids([[1, 2]], "attention_mask")), (), "values lie in"),
        ((Tensor("input_ids", "FP32", (1, 1), bytes(4)),), (), "expected INT64"),
        ((Tensor("text", "BYTES", (1, 2), ("a", "b")),), (), r"shape \[n\]"),
        ((Tensor("text", "BYTES", (257,), ("a",) * 257),), (), "256 texts"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_before_the_module_sees_them(
    instance: HfInstance, inputs: tuple[Tensor, ...], outputs: tuple[str, ...], says: str
) -> None:
    with pytest.raises(BadInput, match=says):
        instance.infer(inputs, outputs)


def test_warming_and_checking_leave_the_answers_alone(instance: HfInstance) -> None:
    before = instance.infer((text(*TEXTS),), ())
    instance.warm()
    instance.check()
    assert instance.infer((text(*TEXTS),), ()) == before


def test_weights_that_give_no_number_fail_the_warm_up(tmp_path: Path, directory: Path, shm: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    write_encoder(broken, seed=3)
    tensors = load_file(broken / "model.safetensors")
    tensors["encoder.layer.1.output.dense.weight"][:] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    views, manifest = bound_views(broken, shm)
    made = HfEngine().load(broken, views, manifest.unbound)
    with pytest.raises(EngineFault) as fault:
        made.warm()
    assert fault.value.kind == "warmup_failed"


def test_a_config_of_other_sizes_does_not_bind(directory: Path, tmp_path: Path, shm: Path) -> None:
    views, manifest = bound_views(directory, shm)
    other = write_encoder(tmp_path / "other", seed=1, hidden=64)
    with pytest.raises(BindingError):
        HfEngine().load(other, views, manifest.unbound)


def test_a_config_that_names_code_or_no_known_model_is_refused(directory: Path, tmp_path: Path, shm: Path) -> None:
    views, _ = bound_views(directory, shm)
    for config in (
        {"model_type": "no-such-model"},
        {"model_type": "x", "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}},
    ):
        root = tmp_path / str(len(config))
        root.mkdir()
        (root / "config.json").write_text(json.dumps(config))
        (root / "evil.py").write_text("raise SystemExit('ran')\n")
        with pytest.raises(EngineFault) as fault:
            HfEngine().load(root, views, ())
        assert fault.value.kind == "not_bindable"


def test_each_pooling_counts_only_attended_tokens() -> None:
    states = torch.tensor([[[9.0, 9.0], [1.0, 2.0], [3.0, 6.0]]])
    mask = torch.tensor([[0, 1, 1]])
    pooled = {name: pool(states, mask, SentenceConfig(name)).tolist()[0] for name in ("mean", "cls", "max", "mean_sqrt_len")}
    assert pooled["mean"] == [2.0, 4.0]
    assert pooled["cls"] == [1.0, 2.0]
    assert pooled["max"] == [3.0, 6.0]
    assert pooled["mean_sqrt_len"] == pytest.approx([4 / 2**0.5, 8 / 2**0.5])
