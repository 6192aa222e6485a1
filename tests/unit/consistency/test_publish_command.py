"""`raftmeta publish`: what is sent to the member, what is printed, and what is refused before a byte is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from raftmeta.cli.main import main
from raftmeta.core import block_file
from raftmeta.core.manifest import Manifest, faults, pack, summarize
from raftmeta.core.module_description import FILE
from tests.support.described_module import chain
from tests.support.stub_http import Answer, StubServer, always, problem, stub_server
from tests.support.weights import file_bytes, safetensors_bytes, tiny_tensors, write_model

PATH = "/v1/models/tiny/versions/1.0.0"


def publishing(body: Any, query: dict[str, str]) -> Answer:
    manifest = msgspec.convert(body["manifest"], Manifest)
    summary = msgspec.structs.asdict(summarize(manifest, pack(manifest)))
    return Answer({"model": "tiny", "label": "1.0.0", "number": 4, **summary}, 201)


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with stub_server({("PUT", PATH): publishing, ("GET", "/v1/cluster"): always(problem("forbidden"))}) as server:
        yield server


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny model")


def run(stub: StubServer, root: Path, *words: str) -> int:
    words = words or ("--all-bound",)
    return main(["publish", str(root), "--model", "tiny", "--label", "1.0.0", "--url", stub.url, "--timeout", "2", *words])


def sent(stub: StubServer) -> Manifest:
    ((method, path, body, headers),) = [request for request in stub.requests if request[0] != "GET"]
    assert (method, path) == ("PUT", PATH)
    assert headers["idempotency-key"]
    return msgspec.convert(body["manifest"], Manifest)


def test_the_manifest_of_the_directory_is_sent(stub: StubServer, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(stub, root, "--unbound", "scalar", "--unbound", "flag") == 0
    manifest = sent(stub)
    assert faults(manifest) == []
    assert {tensor.name for tensor in manifest.tensors} == tiny_tensors().keys()
    assert (manifest.unbound, manifest.engine) == (("flag", "scalar"), "hf")
    assert manifest.sources == (f"file://{root.parent}/tiny%20model/",)
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0] == "tiny/1.0.0 published as number 4"
    assert f"vector root  {manifest.vector_root}" in captured.out
    assert "unbound      flag, scalar" in captured.out
    assert "(100 %)" in captured.err and "publishing tiny/1.0.0" in captured.err


def test_sources_and_engine_are_those_that_were_given(stub: StubServer, root: Path) -> None:
    assert (
        run(stub, root, "--all-bound", "--source", "https://store.example/tiny/", "--source", "file:///mnt/tiny/", "--engine", "plain") == 0
    )
    manifest = sent(stub)
    assert (manifest.sources, manifest.engine) == (("https://store.example/tiny/", "file:///mnt/tiny/"), "plain")


def described(root: Path) -> Path:
    """A directory that describes its module, one layer."""
    root.mkdir()
    layers = [{"name": "a", "type": "Linear", "in_features": 2, "out_features": 2, "bias": False}]
    (root / FILE).write_text(json.dumps(chain(input={"name": "x", "datatype": "FP32", "row": [2]}, layers=layers)))
    (root / "w.safetensors").write_bytes(safetensors_bytes({"a.weight": ("F32", (2, 2), bytes(16))}))
    return root


def test_a_directory_that_describes_its_module_gets_that_engine_and_binds_every_tensor(stub: StubServer, tmp_path: Path) -> None:
    assert run(stub, described(tmp_path / "m"), "--json") == 0
    manifest = sent(stub)
    assert faults(manifest) == []
    assert (manifest.engine, manifest.unbound) == ("torch_module", ())
    blocks = block_file.find(manifest)
    assert blocks is not None
    assert [(file.name, file.role) for file in manifest.files if file != blocks] == [(FILE, "config"), ("w.safetensors", "weights")]


@pytest.mark.parametrize(
    ("words", "description", "reason"),
    [
        (["--json"], '{"format": "raftmeta-module-1"}', "missing required field"),
        (["--json"], "{", "not strict JSON"),
        (["--json"], json.dumps(chain()), "does not fit the tensors beside it: tensor 'a.weight'"),
        (["--json", "--unbound", "a.weight"], "", "asks for every tensor"),
    ],
)
def test_a_description_that_no_node_would_take_is_refused_and_nothing_is_sent(
    stub: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], description: str, reason: str
) -> None:
    root = described(tmp_path / "m")
    if description:
        (root / FILE).write_text(description)
    assert run(stub, root, *words) != 0
    captured = capsys.readouterr()
    assert reason in captured.out + captured.err
    assert [request for request in stub.requests if request[0] != "GET"] == []


def test_what_is_left_out_is_told(stub: StubServer, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "pytorch_model.bin").write_bytes(b"x")
    assert run(stub, root) == 0
    assert "left out: pytorch_model.bin (pickled or opaque weights" in capsys.readouterr().err


def test_json_is_one_value_and_nothing_else(stub: StubServer, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / ".hidden").write_text("x")
    assert run(stub, root, "--all-bound", "--json") == 0
    captured = capsys.readouterr()
    seen = json.loads(captured.out)
    assert (seen["number"], seen["created"], seen["unbound"], seen["tensor_count"]) == (4, True, [], 5)
    assert seen["skipped"] == [{"name": ".hidden", "reason": "hidden"}]
    assert captured.err == ""


def test_block_checks_are_written_beside_the_weights_and_named(stub: StubServer, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(stub, root, "--all-bound", "--json") == 0
    file = block_file.find(sent(stub))
    assert file is not None and (root / file.name).stat().st_size == file.size_bytes
    seen = json.loads(capsys.readouterr().out)["blocks"]
    assert seen == {
        "file": {"name": file.name, "size_bytes": file.size_bytes, "sha256": file.sha256},
        "note": "copies of DIR should have it, too",
    }


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--no-blocks",), "blocks       none, as asked"),
        (("--source", "s3://bucket/tiny/"), "blocks       none: the sources may lack it; `raftmeta vector DIR --write-blocks`"),
    ],
)
def test_a_publish_without_block_checks_says_so(
    stub: StubServer, root: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    assert run(stub, root, "--all-bound", *words) == 0
    assert block_file.find(sent(stub)) is None
    assert told in capsys.readouterr().out
    assert not list(root.glob("*.wcv"))


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        (
            [],
            "next         raftmeta deploy NAME --model tiny --primary ZONE:NODE --standby ZONE:NODE\n"
            "             raftmeta activate NAME 1.0.0\n",
        ),
        ([("search", "tiny"), ("other", "large")], "next         raftmeta activate search 1.0.0\n"),
        (None, "next         raftmeta activate DEPLOYMENT 1.0.0\n"),
    ],
)
def test_the_next_step_is_one_that_can_be_taken(
    stub: StubServer, root: Path, capsys: pytest.CaptureFixture[str], listed: list[tuple[str, str]] | None, told: str
) -> None:
    page = (
        problem("forbidden")
        if listed is None
        else Answer({"items": [{"name": name, "model": model} for name, model in listed], "next": None})
    )
    stub.routes["GET", "/v1/deployments"] = always(page)
    assert run(stub, root) == 0
    assert capsys.readouterr().out.endswith(told)


def test_the_same_bytes_again_are_a_success(stub: StubServer, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def again(body: Any, query: dict[str, str]) -> Answer:
        return Answer(publishing(body, query).body, 200)

    stub.routes["PUT", PATH] = again
    assert run(stub, root) == 0
    told = capsys.readouterr().out
    assert "already published with the same bytes as number 4" in told
    assert "blocks       as they were published first" in told


def test_other_bytes_under_the_label_are_refused_by_the_member(stub: StubServer, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stub.routes["PUT", PATH] = always(problem("version_exists", "tiny/1.0.0 holds other bytes"))
    assert run(stub, root) == 1
    captured = capsys.readouterr()
    assert "tiny/1.0.0 holds other bytes (version_exists)" in captured.err
    assert captured.out == ""


def test_a_directory_that_fails_a_check_sends_nothing(stub: StubServer, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = {"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}
    (root / "model.safetensors").write_bytes(file_bytes(header, bytes(8)))
    assert run(stub, root) == 1
    assert "expected 12 bytes, found 8 bytes (bad_manifest)" in capsys.readouterr().err
    assert [request for request in stub.requests if request[0] != "GET"] == []


def test_a_directory_that_is_none_of_a_model_says_what_was_expected_and_found(
    stub: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("x")
    assert run(stub, tmp_path) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error == f"error: {str(tmp_path)!r} holds no *.safetensors: expected at least one, found notes.txt (bad_manifest)"
    assert "config.json and *.safetensors" in hint
    assert run(stub, tmp_path / "not there") == 3
    error, hint = capsys.readouterr().err.splitlines()
    assert "not there is no directory: No such file or directory; expected" in error and "for example: raftmeta publish " in hint
    assert stub.requests == []


def test_nothing_is_read_when_no_member_answers_or_knows_who_asks(stub: StubServer, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stub.routes["GET", "/v1/cluster"] = always(problem("unauthenticated", "expected a bearer token"))
    assert run(stub, root) == 1
    told = capsys.readouterr().err
    assert "expected a bearer token (unauthenticated)" in told and "read " not in told
    gone = ["publish", str(root), "--model", "tiny", "--label", "1", "--url", "http://127.0.0.1:9", "--timeout", "0.2"]
    assert main(gone) == 2
    told = capsys.readouterr().err
    assert "(no_quorum)" in told and "read " not in told


def test_what_is_wrong_with_a_source_is_said_before_anything_is_read_or_asked(
    stub: StubServer, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(stub, root, "--all-bound", "--source", "ftp://store.example/tiny/") == 3
    error, hint = capsys.readouterr().err.splitlines()
    assert "--source 'ftp://store.example/tiny/' is not a file, http, https or s3 URL" in error and "s3://bucket/prefix/" in hint
    assert stub.requests == []


@pytest.mark.parametrize(
    "words",
    [
        ["--model", "Tiny"],
        ["--model", "a/b"],
        ["--label", "../1"],
        ["--label", "-"],
        ["--unbound", "flag", "--all-bound"],
        ["--sauce", "x"],
    ],
)
def test_a_wrong_command_line_exits_3_before_anything_is_read(stub: StubServer, tmp_path: Path, words: list[str]) -> None:
    assert run(stub, tmp_path / "not there", *words) == 3
    assert stub.requests == []


PROBE = {
    "name": "texts",
    "measure": "cosine",
    "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["hello"]}],
    "outputs": [{"name": "embedding", "datatype": "FP32", "shape": [1, 1], "data": "AACAPw=="}],
}


def test_probes_of_a_file_become_part_of_the_manifest(stub: StubServer, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root.parent / "probes.json").write_text(json.dumps({"probes": [PROBE]}))
    assert run(stub, root, "--all-bound", "--probes", str(root.parent / "probes.json")) == 0
    (probe,) = sent(stub).probes
    assert (probe.name, probe.inputs[0].data, probe.outputs[0].data) == ("texts", ("hello",), b"\0\0\x80\x3f")
    assert "probes       texts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{}", "required field"),
        ('{"probes": []}', "holds no probe"),
        ("not json", "cannot be read"),
        (json.dumps({"probes": [PROBE, PROBE]}), "same name"),
        (json.dumps({"probes": [PROBE | {"measure": "vibes"}]}), "vibes"),
        (json.dumps({"probes": [PROBE | {"surprise": 1}]}), "unknown field"),
    ],
)
def test_a_file_without_sound_probes_is_a_usage_error_and_nothing_is_sent(
    stub: StubServer, root: Path, capsys: pytest.CaptureFixture[str], content: str, fault: str
) -> None:
    (root.parent / "probes.json").write_text(content)
    assert run(stub, root, "--all-bound", "--probes", str(root.parent / "probes.json")) == 3
    assert fault in capsys.readouterr().err
    assert stub.requests == []
