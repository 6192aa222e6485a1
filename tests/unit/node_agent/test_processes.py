"""What the processes of an agent load, how often a child is started again, and what a start refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from node_agent import names
from node_agent.supervisor import LONGEST_WAIT_S, start_wait_s
from raftmeta.cli.exits import Exit
from raftmeta.cli.main import main as cli
from tests.support.certificates import TestAuthority


@pytest.mark.parametrize("module", ["supervisor", "http_server", "control", "proving"])
def test_only_workers_load_torch(module: str) -> None:
    code = f"import sys, node_agent.{module}; print([name for name in ('torch', 'transformers', 'numba') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("engines", "loaded"), [(("torch_module",), ["torch"]), ((), ["torch", "transformers"])])
def test_a_node_loads_the_libraries_of_its_engines_and_no_other(engines: tuple[str, ...], loaded: list[str]) -> None:
    code = f"import sys; from node_agent.engine import known; known.load({engines}); import node_agent.host, node_agent.worker"
    show = "print(*(name for name in ('torch', 'transformers') if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", f"{code}; {show}"], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.split() == loaded


def test_a_child_that_keeps_ending_is_started_ever_more_slowly_within_a_bound() -> None:
    waits = [start_wait_s(failures) for failures in range(1, 200)]
    assert waits[0] == 0.0
    assert waits == sorted(waits)
    assert waits[-1] == LONGEST_WAIT_S


def test_file_names_stay_short_and_tell_agents_apart(tmp_path: Path) -> None:
    long = "n" * 128
    name = names.arena(tmp_path / "a", long, "d" * 128)
    assert len(names.control_block(name)) < 150
    assert name != names.arena(tmp_path / "b", long, "d" * 128)
    assert name != names.arena(tmp_path / "a", long, "d" * 127 + "e")


def test_a_configuration_with_faults_ends_the_start_with_all_of_them(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text('node = "N"\n')
    command = [sys.executable, "-m", "raftmeta.cli.main", "agent", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == Exit.USAGE
    error, hint = done.stderr.splitlines()
    for field in ("node", "zone", "member_urls", "store_dir"):
        assert field in error
    assert error.startswith(f"error: {path}: ") and hint.startswith("hint:  correct the file")


@pytest.mark.parametrize("spoiled", ["other key", "no key", "no principals", "a plain token"])
def test_files_of_the_serving_port_that_cannot_be_used_end_the_start_before_anything_runs(tmp_path: Path, spoiled: str) -> None:
    authority = TestAuthority(tmp_path)
    files, other = authority.agent("n1"), authority.agent("other")
    principals = tmp_path / "principals.toml"
    principals.write_text(f'[[principal]]\nname = "app"\nrole = "inference"\ntoken_sha256 = "{"0" * 64}"\n')
    if spoiled == "a plain token":
        principals.write_text('[[principal]]\nname = "app"\nrole = "inference"\ntoken = "secret"\n')
    if spoiled == "no principals":
        principals.unlink()
    key = {"other key": other.key, "no key": tmp_path / "none.key"}.get(spoiled, files.key)
    path = tmp_path / "agent.toml"
    path.write_text(
        'node = "n1"\nzone = "a"\nmember_urls = ["http://127.0.0.1:1"]\nlisten = "127.0.0.1:0"\nstore_dir = "store"\n'
        f'arena_dir = "{tmp_path}"\ntls_cert = "{files.certificate}"\ntls_key = "{key}"\nprincipals_file = "principals.toml"\n'
    )
    command = [sys.executable, "-m", "raftmeta.cli.main", "agent", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == Exit.USAGE
    assert str(key if "key" in spoiled else principals) in done.stderr
    assert "process_started" not in done.stderr
    assert not (tmp_path / "store" / "run" / "address").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [([], "Missing option '--config'"), (["--config", "x", "--role", "front"], "--role"), (["--cofnig", "x"], "--cofnig")],
)
def test_a_wrong_command_line_has_the_shape_of_every_commands_errors(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["agent", *words]) == Exit.USAGE
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and says in error and error.endswith("(usage)")
    assert "raftmeta agent --config ./cluster/agents/node-a/agent.toml" in hint


@pytest.mark.parametrize("change", [["--role", "cook"], ["--index", "first"]])
def test_a_child_is_started_by_its_supervisor_and_refuses_any_other_words(change: list[str]) -> None:
    words = {"--role": "front", "--config": "x", "--boot-id": "b", "--index": "0", "--parent": "1", "--port": "1"} | dict([change])
    command = [sys.executable, "-m", "node_agent.child", *(word for pair in words.items() for word in pair)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and change[1] in done.stderr
