"""The layers are a failing test: the import contracts of pyproject.toml hold, and would be seen to break."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def lint(config: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    words = [sys.executable, "-c", code, "--no-cache", "--config", str(config)]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_every_import_contract_holds() -> None:
    done = lint(ROOT / "pyproject.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_a_layer_that_points_upwards_is_seen(tmp_path: Path) -> None:
    """The same check with two layers swapped must fail: it looks at something."""
    (tmp_path / "upside-down.toml").write_text(
        '[tool.importlinter]\nroot_packages = ["raftmeta"]\n'
        '[[tool.importlinter.contracts]]\nname = "upside down"\ntype = "layers"\nlayers = ["raftmeta.core", "raftmeta.client"]\n'
    )
    done = lint(tmp_path / "upside-down.toml")
    assert done.returncode == 1 and "1 broken" in done.stdout, done.stdout + done.stderr


def test_the_four_packages_are_all_under_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    packages = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert settings["tool"]["importlinter"]["root_packages"] == packages
    assert settings["tool"]["mypy"]["files"] == [*packages, "benchmarks"]


def test_types_are_checked_where_the_peers_of_the_benchmarks_are_not_installed() -> None:
    """`make install` leaves the peers out, so a module of one that mypy is not told to do without fails on a new machine only."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    peers = settings["project"]["optional-dependencies"]["bench"][1:]
    modules = {re.split(r"[<>=\[]", peer)[0].replace("-", "_") for peer in peers}
    missed = {module.removesuffix(".*") for override in settings["tool"]["mypy"]["overrides"] for module in override["module"]}
    assert modules and modules <= missed
