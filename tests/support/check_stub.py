"""Scripted members and nodes behind one HTTP server on loopback, for tests that run `raftmeta check` as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from raftmeta.cli.main import main
from tests.support.fake_fleet import DEPLOYMENT, FakeFleet, routes, vector_route, vectors_route
from tests.support.stub_http import StubServer, stub_server


@contextmanager
def serving_fleet(fleet: FakeFleet) -> Iterator[StubServer]:
    with stub_server(routes(fleet)) as server:
        for name, node in fleet.nodes_by_name.items():
            fleet.urls[name] = f"{server.url}/{name}"
            server.routes["GET", f"/{name}/raftmeta/v1/vector/{DEPLOYMENT}"] = vector_route(node)
            server.routes["GET", f"/{name}/raftmeta/v1/vector"] = vectors_route(node)
        yield server


def run(stub: StubServer, *words: str) -> int:
    """The exit status of `raftmeta check` against these members, whose deadlines are short."""
    return main(["check", "--url", stub.url, "--timeout", "2", *words])
