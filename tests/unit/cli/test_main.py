"""The front door: finding commands, help, mistyped words, exit codes and the shape of errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmeta.cli import commands, exits, suggest
from raftmeta.cli.main import CUDA, load, main
from raftmeta.core.errors import CODES, ErrorClass, RaftmetaError

NAMES = sorted(commands.COMMANDS)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert f"raftmeta {name}" in out and "--json" in out if name not in ("server", "agent") else f"raftmeta {name}" in out
    assert "xample" in out


@pytest.mark.parametrize("name", NAMES)
def test_every_example_calls_its_own_command_and_stands_in_a_known_group(name: str) -> None:
    info = commands.COMMANDS[name]
    program, *words = info.example.split()
    found = commands.find(words)
    assert program == "raftmeta" and found is not None and found[0] == name
    assert info.group in commands.GROUPS and callable(load(name))


def test_the_overview_names_every_command_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["help"]):
        assert main(words) == 0
        out = capsys.readouterr().out
        assert all(f"  {name} " in out for name in NAMES)
        assert all(f"  {int(code)} " in out for code, _ in exits.MEANINGS)


def test_the_overview_imports_neither_the_server_nor_torch_nor_the_client() -> None:
    code = "import sys; from raftmeta.cli.main import main; main(['--help']); print([m for m in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stderr
    for module in ("torch", "fastapi", "httpx", "typer", "numpy", "pysyncobj", "raftmeta.log"):
        assert f"'{module}'" not in loaded


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("actvate", "activate"), ("rollbak", "rollback"), ("STATUS", "status"), ("chek", "check"), ("undo", "rollback"), ("push", "publish"),
     ("members", "cluster status"), ("pub", "publish")],
)  # fmt: skip
def test_a_mistyped_command_gets_the_nearest_and_an_example(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([typed, "x"]) == exits.Exit.USAGE
    err = capsys.readouterr().err
    assert err.splitlines() == [
        f"error: {typed!r} is no command (usage)",
        f"hint:  did you mean `{meant}`? For example: {commands.COMMANDS[meant].example}",
    ]


def test_a_word_near_nothing_points_to_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zzzzqq"]) == exits.Exit.USAGE
    assert "raftmeta --help" in capsys.readouterr().err


def test_a_group_without_its_command_lists_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster"]) == exits.Exit.USAGE
    assert "cluster status" in capsys.readouterr().out
    assert main(["cluster", "--help"]) == 0
    capsys.readouterr()
    assert main(["cluster", "statsu"]) == exits.Exit.USAGE
    assert "did you mean `cluster status`" in capsys.readouterr().err
    assert main(["agent", "inspekt"]) == exits.Exit.USAGE  # where the word before is a command, too
    err = capsys.readouterr().err
    assert "'agent inspekt' is no command" in err and "did you mean `agent inspect`" in err


@pytest.mark.parametrize(
    ("words", "said"), [(["agent", "foo"], "inspect, plan, cordon, pin, abort, reclaim"), (["cluster", "x"], "raise-level")]
)
def test_a_word_of_a_group_that_is_near_nothing_gets_the_list_of_the_group(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == exits.Exit.USAGE
    error, hint = capsys.readouterr().err.splitlines()
    assert error == f"error: {' '.join(words)!r} is no command (usage)"
    assert said in hint and f"`raftmeta {words[0]} --help`" in hint and "did you mean" not in hint


@pytest.mark.parametrize("words", [["agent", "--help"], ["help", "agent"]])
def test_the_help_of_a_command_names_those_below_it(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "--purge-arena" in out and all(f"  {name} " in out for name in commands.below("agent"))


@pytest.mark.parametrize(
    "words",
    [
        ["activate"],
        ["activate", "a", "b", "c"],
        ["activate", "--jsn"],
        ["status", "--timeout", "soon"],
        ["--json", "status"],
        ["watch", "--resource", "cats"],
        ["deploy", "s", "--model", "m", "--primary", "a"],
        ["deploy", "s", "--model", "m", "--primary", "a:n,n"],
    ],
)
def test_a_wrong_command_line_is_one_error_one_hint_and_exit_code_3(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == exits.Exit.USAGE
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert "Traceback" not in text and "example" in text


def test_with_json_an_error_is_one_json_value_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["activate", "--json"]) == exits.Exit.USAGE
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert error["code"] == "usage" and error["exit"] == 3 and "activate" in error["hint"]
    assert captured.err == ""


def test_a_faulty_client_configuration_is_reported_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "client.toml").write_text("url = 1")
    assert main(["status", "--config", str(tmp_path / "client.toml")]) == exits.Exit.USAGE
    assert "'url' is no setting" in capsys.readouterr().err


def test_files_of_a_client_that_are_not_there_lead_to_what_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "client.toml"
    assert main(["status", "--config", str(file)]) == exits.Exit.USAGE
    error, hint = capsys.readouterr().err.splitlines()
    assert str(file) in error and "DIR/client.toml" in hint and "for example: raftmeta status --config" in hint
    file.write_text('token_file = "none.token"')
    assert main(["status", "--config", str(file)]) == exits.Exit.USAGE
    error, hint = capsys.readouterr().err.splitlines()
    assert "none.token" in error and "tokens/ROLE.token" in hint


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_error_code_has_a_hint_and_an_exit_code(code: str) -> None:
    error = RaftmetaError(code, "d")
    assert exits.hint(error)
    if error.info.error_class is ErrorClass.UNAVAILABLE:
        assert exits.exit_code(error) == exits.Exit.UNAVAILABLE
    else:
        usage = code.startswith("unknown_") or code in ("bad_field", "bad_name", "bad_request")
        assert exits.exit_code(error) == (exits.Exit.USAGE if usage else exits.Exit.NO)


@given(st.text(max_size=20))
def test_any_word_gets_a_suggestion_or_none_never_a_crash(word: str) -> None:
    meant = suggest.nearest(word, commands.COMMANDS)
    assert meant is None or meant in commands.COMMANDS


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("raftmeta 0.")


def test_readme_guarantees_and_version_say_alike_that_cuda_is_unproven(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [CUDA] == ["CUDA: unproven on a device"]
    root = Path(__file__).parents[3]
    for page in ("README.md", "docs/guarantees.md", "ARCHITECTURE.md"):
        assert CUDA in (root / page).read_text("utf-8"), page
