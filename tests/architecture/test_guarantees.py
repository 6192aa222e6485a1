"""The tables of guarantees name tests that exist, every row's test is in its table, and every case has a test or says that it has none."""

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


def test_every_case_that_operators_reported_names_its_test_or_says_that_nothing_is_built_yet() -> None:
    text = (ROOT / "docs/guarantees.md").read_text()
    section = text.partition("## Cases that operators reported")[2]
    rows = [line.split(" | ") for line in section.splitlines() if re.match(r"\| M\d", line)]
    assert [cells[0] for cells in rows] == [f"| M{number}" for number in range(1, len(rows) + 1)] != []
    for cells in rows:
        assert len(cells) == 4, cells
        assert re.search(r"`test_\w+`|not built yet", cells[3]), cells[0]
