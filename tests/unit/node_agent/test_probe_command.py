from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("transformers")

from node_agent import probe
from node_agent.messages import Tensor
from node_agent.probe_command import answers
from node_agent.probe_inputs import TEXTS, of_texts
from raftmeta.cli.main import main
from raftmeta.core import probes
from raftmeta.core.probes import Probe
from tests.support.described_module import chain, write_version
from tests.support.tiny_encoder import write_encoder


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("probe") / "v1", seed=1)


def made(directory: Path, *texts: str) -> Probe:
    (found,) = answers(directory, [of_texts(texts or TEXTS, "texts", 0.0)])
    return found


def test_what_a_directory_answers_is_sound_recorded_and_the_same_again(directory: Path) -> None:
    first, second = made(directory), made(directory)
    assert list(probes.faults([first])) == []
    assert (first.measure, first.threads, first.padding) == ("cosine", 1, "longest") and first.kernel.startswith("torch ")
    assert first == second
    again = second.outputs[0]
    (found,) = probe.measure(first, [Tensor(again.name, again.datatype, again.shape, again.data)], ("F32",))
    assert found.holds


def test_other_weights_answer_otherwise(directory: Path, tmp_path: Path) -> None:
    other = made(write_encoder(tmp_path / "v2", seed=2)).outputs[0]
    (found,) = probe.measure(made(directory), [Tensor(other.name, other.datatype, other.shape, other.data)], ("F32",))
    assert not found.holds and found.value < 0.99


def test_the_file_is_what_publish_reads(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "probes.json"
    assert main(["probe", str(directory), "--out", str(out), "--text", "one", "--text", "two three"]) == 0
    assert "--probes" in capsys.readouterr().out
    assert main(["probe", str(directory), "--text", "one", "--text", "two three"]) == 0
    assert capsys.readouterr().out == out.read_text()
    assert main(["probe", str(directory), "--out", str(out), "--json", "--text", "one", "--text", "two three"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["probes"], told["rows"], told["threads"]) == (1, 2, 1)
    (found,) = msgspec.convert(json.loads(out.read_text())["probes"], tuple[Probe, ...])
    assert found.inputs[0].data == ("one", "two three")


def test_a_directory_that_cannot_be_run_is_an_error_and_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_encoder(tmp_path / "v1", seed=1)
    (directory / "config.json").write_text("{}")
    assert main(["probe", str(directory), "--out", str(tmp_path / "probes.json")]) == 1
    assert "cannot be run" in capsys.readouterr().err
    assert not (tmp_path / "probes.json").exists()
    assert main(["probe", str(tmp_path / "none")]) == 3
    assert main(["probe", str(directory), "--limit", "7"]) == 3


@pytest.mark.parametrize("out", ["none/probes.json", ".", "v1/model.safetensors/probes.json"])
def test_a_file_that_cannot_be_written_is_said_before_the_model_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    directory = write_encoder(tmp_path / "v1", seed=1)
    monkeypatch.setitem(sys.modules, "torch", None)  # whoever imports it fails
    assert main(["probe", str(directory), "--out", str(tmp_path / out)]) == 3
    error, hint = capsys.readouterr().err.splitlines()
    assert "--out" in error and "cannot be written" in error and "for example: --out probes.json" in hint


def test_a_directory_without_weights_is_said_before_anything_heavy_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["probe", str(tmp_path)]) == 1
    assert "holds no *.safetensors" in capsys.readouterr().err


def written(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Probe, ...]:
    assert main(["probe", *words]) == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=dict[str, tuple[Probe, ...]])["probes"]
    assert list(probes.faults(found)) == []
    return found


def holds(probe_made: Probe, directory: Path, capsys: pytest.CaptureFixture[str], *words: str) -> bool:
    """Whether the answers of a directory, asked the same, are near enough to a probe."""
    (other,) = written(capsys, str(directory), *words)
    answered = [Tensor(item.name, item.datatype, item.shape, item.data) for item in other.outputs]
    return all(found.holds for found in probe.measure(probe_made, answered, ("F32",)))


def test_a_described_module_is_asked_numbers_that_follow_a_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write_version(tmp_path / "v1", 1), write_version(tmp_path / "v2", 2)
    (made,) = written(capsys, str(first))
    assert (made.name, made.measure, made.inputs[0].shape, made.outputs[0].shape) == ("drawn", "close", (8, 4), (8, 3))
    assert made.kernel.startswith("torch ") and made.threads == 1
    assert holds(made, first, capsys) and not holds(made, second, capsys)
    (other,) = written(capsys, str(first), "--seed", "2", "--rows", "3", "--name", "more", "--limit", "0.5")
    assert (other.name, other.inputs[0].shape, other.limit) == ("more", (3, 4), 0.5)
    assert other.inputs[0].data[:16] != made.inputs[0].data[:16]


def test_ids_that_are_drawn_are_those_of_the_embedding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = [{"name": "e", "type": "Embedding", "num_embeddings": 5, "embedding_dim": 3}, {"name": "f", "type": "Flatten"}]
    description = chain(input={"name": "ids", "datatype": "INT64", "row": [2]}, layers=layers)
    (made,) = written(capsys, str(write_version(tmp_path / "v1", 1, description)), "--rows", "100")
    assert isinstance(made.inputs[0].data, bytes)
    assert set(np.frombuffer(made.inputs[0].data, "<i8").tolist()) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("kind", ["described", "encoder"])
def test_each_line_of_a_file_is_a_probe_whatever_the_directory_holds(
    kind: str, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "described":
        where, given = write_version(tmp_path / "v1"), {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    else:
        where, given = directory, {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["hello world"]}
    lines = [{"inputs": [given]}, {"name": "near", "inputs": [given], "measure": "cosine", "limit": 0.9}]
    file = tmp_path / "lines.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    first, second = written(capsys, str(where), "--inputs", str(file))
    assert (first.name, first.measure, first.limit) == ("line-1", "close", 0.0)
    assert (second.name, second.measure, second.limit) == ("near", "cosine", 0.9)
    assert first.inputs == second.inputs and first.outputs == second.outputs != ()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("{", "line 1"),
        ('{"inputs": [{"name": "x", "shape": [2, 4], "datatype": "FP32", "data": [1]}]}', "line-1: input 'x'"),
        ('{"inputs": [{"name": "z", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}', "'line-1' cannot be asked"),
        ("\n".join(['{"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}'] * 17), "up to 16 probes"),
        ("", "no line holds a question"),
        (
            '{"name": "two words", "inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}',
            "without blanks",
        ),
    ],
)
def test_lines_that_cannot_be_asked_are_named_and_nothing_is_written(
    lines: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "lines.jsonl", tmp_path / "probes.json"
    file.write_text(lines)
    assert main(["probe", str(write_version(tmp_path / "v1")), "--inputs", str(file), "--out", str(out)]) == 3
    assert said in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--text", "a"), "--text does not belong to a described module"),
        (("--inputs", "none.jsonl"), "none.jsonl cannot be read"),
        (("--inputs", ".", "--seed", "1"), "--seed does not belong to --inputs"),
        (("--inputs", ".", "--limit", "0"), "--limit does not belong to --inputs"),
        (("--rows", "0"), "--rows"),
    ],
)
def test_options_that_a_described_module_does_not_take_are_refused(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", str(write_version(tmp_path / "v1")), *words]) == 3
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--rows", "--seed"])
def test_nothing_is_drawn_for_an_encoder(directory: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", str(directory), option, "1"]) == 3
    assert f"{option} does not belong to texts" in capsys.readouterr().err
