"""Commands as a user gives them, against a member that is played."""

from __future__ import annotations

from raftmeta.cli.main import main
from tests.support.stub_http import StubServer


def run(stub: StubServer, *words: str) -> int:
    """The exit code."""
    return main([*words, "--url", stub.url, "--timeout", "2"])
