"""The wall around the library: one importer, one pinned source, and a table that says how every method is treated."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import time
from pathlib import Path

import pysyncobj.syncobj
import pytest

from raftmeta.core.errors import RaftmetaError
from raftmeta.log import library, wall
from raftmeta.log.clock import check_clock
from raftmeta.log.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `(\w+)` \| (inherited|wrapped|replaced|unused) \|", re.MULTILINE)


def table() -> dict[str, str]:
    return dict(ROW.findall((ROOT / "docs/adr/engine-behind-a-wall.md").read_text()))


def library_methods() -> dict[str, str]:
    """Names as in the source -> names as in the class."""
    found = {name for name, value in vars(pysyncobj.syncobj.SyncObj).items() if inspect.isfunction(value) or isinstance(value, property)}
    return {name.replace("_SyncObj__", "__"): name for name in found}


def test_every_method_of_the_installed_library_has_a_row() -> None:
    assert sorted(table()) == sorted(library_methods())


def test_the_engine_treats_each_method_as_its_row_says() -> None:
    ours = Engine.__mro__[: Engine.__mro__.index(pysyncobj.syncobj.SyncObj)]
    own = {name for part in ours for name in vars(part)}
    source = inspect.getsource(wall)
    for name, how in table().items():
        mangled = library_methods()[name]
        overridden = mangled in own
        assert overridden is (how in ("wrapped", "replaced")), f"{name} is {'' if overridden else 'not '}overridden, the row says {how}"
        calls_library = f"SyncObj.{mangled}(" in source or (name == "__init__" and "super().__init__(" in source)
        if how == "wrapped":
            assert calls_library, f"{name} is said to be wrapped, but the library's is never called"


def product_files() -> list[Path]:
    return [file for package in ("raftmeta", "api", "node_agent", "consistency") for file in sorted((ROOT / package).rglob("*.py"))]


def test_one_file_imports_the_library() -> None:
    importers = []
    for file in product_files():
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None) or ""]
            if isinstance(node, ast.Import | ast.ImportFrom) and any(name.split(".")[0] == "pysyncobj" for name in names):
                importers.append(file.relative_to(ROOT).as_posix())
    assert set(importers) == {"raftmeta/log/wall.py"}


def test_one_file_names_the_private_parts_of_the_library() -> None:
    assert [file.relative_to(ROOT).as_posix() for file in product_files() if "_SyncObj__" in file.read_text()] == ["raftmeta/log/wall.py"]


def test_another_source_of_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library.check_library()
    monkeypatch.setattr(library, "DIGEST", "0" * 64)
    with pytest.raises(RaftmetaError, match="is not the 0"):
        library.check_library()


def test_a_library_that_reads_another_clock_than_the_log_is_refused() -> None:
    check_clock(wall.library_clock)
    with pytest.raises(RaftmetaError, match="reads a clock that is"):
        check_clock(time.time)


def test_python_without_asserts_is_refused() -> None:
    script = "from raftmeta.log.library import check_library; check_library()"
    ended = subprocess.run([sys.executable, "-O", "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode != 0 and "python -O removes the asserts" in ended.stderr
