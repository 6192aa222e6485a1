"""Nothing that another machine says can do anything to a terminal, and JSON means the same afterwards."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmeta.cli.escapes import json_text, printable
from raftmeta.cli.main import main
from raftmeta.cli.output import Progress
from tests.support.stub_http import always, problem, stub_server

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\u202e"


@given(st.recursive(st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_is_printable_and_says_the_same(value: object) -> None:
    text = json_text(value)
    assert text.isprintable() and json.loads(text) == value
    assert json.loads(json_text(value, indent=2)) == value


def test_an_escape_shows_what_it_was() -> None:
    assert printable("a\x1b\x9bä\n") == "a\\x1b\\x9bä\\n"
    assert json_text(["ä\x9b"]) == '["ä\\u009b"]'


def test_progress_shows_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(quiet=False) as progress:
        progress.say(f"n1 and n2 differ: {HOSTILE}")
    assert capsys.readouterr().err.removesuffix("\n").isprintable()


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_what_a_member_says_in_an_error_shows_no_control_characters(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with stub_server({("GET", "/v1/deployments/x"): always(problem("unknown_deployment", HOSTILE))}) as server:
        assert main(["status", "x", "--url", server.url, *words]) == 3
    captured = capsys.readouterr()
    assert all(line.isprintable() for line in (captured.out + captured.err).splitlines())
    assert "owned" in captured.out + captured.err
