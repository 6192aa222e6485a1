from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("transformers")

from node_agent import probe
from node_agent.messages import Tensor
from node_agent.probe_command import TEXTS, ProbeOptions, answers
from raftmeta.cli.main import main
from raftmeta.core import probes
from raftmeta.core.probes import Probe
from tests.support.described_module import write_version
from tests.support.tiny_encoder import write_encoder


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("probe") / "v1", seed=1)


def made(directory: Path, *texts: str) -> Probe:
    return answers(directory, texts or TEXTS, ProbeOptions(directory=directory))


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
    assert json.loads(capsys.readouterr().out)["texts"] == 2
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


def test_a_directory_that_describes_its_module_is_told_that_it_takes_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_version(tmp_path / "v1")
    assert main(["probe", str(directory)]) == 3
    assert "describes a module that takes no text" in capsys.readouterr().err
