from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from node_agent.engine import sentence
from node_agent.engine.port import EngineFault
from node_agent.engine.sentence import SentenceConfig

KIND = "sentence_transformers.models."


def write(root: Path, name: str, value: Any) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def modules(*kinds: str) -> list[dict[str, Any]]:
    return [{"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "", "type": KIND + kind} for n, kind in enumerate(kinds)]


def refusal(root: Path) -> str:
    with pytest.raises(EngineFault) as refused:
        sentence.read(root)
    assert refused.value.kind == "not_bindable"
    return refused.value.detail


def test_a_plain_encoder_gives_the_mean_without_normalizing(tmp_path: Path) -> None:
    assert sentence.read(tmp_path) == SentenceConfig("mean", False, None)


def test_the_layout_of_the_demo_model_is_understood(tmp_path: Path) -> None:
    write(tmp_path, "modules.json", modules("Transformer", "Pooling", "Normalize"))
    flags = {"word_embedding_dimension": 384, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    write(tmp_path, "1_Pooling/config.json", flags)
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 256, "do_lower_case": False})
    assert sentence.read(tmp_path) == SentenceConfig("mean", True, 256)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_each_known_pooling_is_taken(tmp_path: Path, config: dict[str, Any], pooling: str) -> None:
    write(tmp_path, "modules.json", modules("Transformer", "Pooling"))
    write(tmp_path, "1_Pooling/config.json", config)
    assert sentence.read(tmp_path) == SentenceConfig(pooling, False, None)


def test_a_module_that_would_change_the_answer_is_refused_not_left_out(tmp_path: Path) -> None:
    write(tmp_path, "modules.json", modules("Transformer", "Pooling", "Dense", "Normalize"))
    assert "Dense" in refusal(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"pooling_mode_lasttoken": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {"pooling_mode": "weird"},
        [],
        "{",
    ],
)
def test_an_unknown_pooling_is_refused(tmp_path: Path, config: Any) -> None:
    write(tmp_path, "modules.json", modules("Transformer", "Pooling"))
    write(tmp_path, "1_Pooling/config.json", config)
    assert "config.json" in refusal(tmp_path)


def test_missing_pooling_settings_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "modules.json", modules("Transformer", "Pooling"))
    assert "no file" in refusal(tmp_path)


def test_a_pooling_path_out_of_the_version_is_refused(tmp_path: Path) -> None:
    listed = modules("Transformer", "Pooling")
    listed[1]["path"] = "../../elsewhere"
    write(tmp_path, "modules.json", listed)
    assert "inside the version" in refusal(tmp_path)


@pytest.mark.parametrize("value", [0, -1, "256", True])
def test_a_length_that_is_none_is_refused(tmp_path: Path, value: Any) -> None:
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": value})
    assert "max_seq_length" in refusal(tmp_path)
