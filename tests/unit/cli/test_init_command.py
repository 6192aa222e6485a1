"""`raftmeta init` as a command: what it prints leads on, and a wrong request writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raftmeta.cli.exits import Exit
from raftmeta.cli.main import main
from raftmeta.client.config import load


def test_it_prints_what_to_start_and_where_the_client_finds_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "cluster"
    assert main(["init", str(target), "--zones", "a,b,c", "--agent", "a:node-a", "--base-port", "0"]) == Exit.OK
    out = capsys.readouterr().out
    assert f"keep away from the machines: {target / 'authority' / 'ca.key'}" in out and (target / "authority" / "ca.key").is_file()
    for name in ("a/server.toml", "b/server.toml", "c/server.toml", "agents/node-a/agent.toml", "client.toml"):
        assert str(target / name) in out and (target / name).is_file()


def test_the_clients_configuration_is_one_that_the_client_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "c"), "--zones", "x", "--base-port", "0", "--json"]) == Exit.OK
    told = json.loads(capsys.readouterr().out)
    connection = load(Path(told["client"]))
    assert list(connection.urls) == told["urls"] and connection.token() and connection.ca_file and connection.ca_file.is_file()


@pytest.mark.parametrize(
    ("words", "exit_code", "said"),
    [
        (["--zones", "a,,b"], Exit.USAGE, "expected names separated by commas"),
        (["--zones", "A"], Exit.USAGE, "zone 'A'"),
        (["--agent", "z:node"], Exit.USAGE, "names a zone that is not among"),
        (["--hosts", "h1"], Exit.USAGE, "1 hosts for 3 zones"),
        (["--base-port", "65535"], Exit.USAGE, "base port"),
    ],
)
def test_a_wrong_request_says_what_is_wrong_and_writes_nothing(
    words: list[str], exit_code: Exit, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / "cluster"), *words]) == exit_code
    error, hint = capsys.readouterr().err.splitlines()
    assert said in error and "for example: " in hint
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_there_is_never_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "keep").touch()
    assert main(["init", str(tmp_path), "--zones", "a"]) == Exit.USAGE
    error, hint = capsys.readouterr().err.splitlines()
    assert "exists already" in error and f"for example: raftmeta init {tmp_path}-2 " in hint
    assert [path.name for path in tmp_path.iterdir()] == ["keep"]
