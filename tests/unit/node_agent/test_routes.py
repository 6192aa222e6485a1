"""Paths of the serving port: which are there, what they take, and what a name may hold."""

from __future__ import annotations

import pytest

from node_agent.routes import ROUTES, Kind, find, speaks_protocol
from node_agent.serve import ServeError
from raftmeta.security.roles import ACTIONS


def refusal(path: bytes, method: str = "GET") -> ServeError:
    with pytest.raises(ServeError) as refused:
        find(path, method)
    return refused.value


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (b"/v2/models/m", ("m", "", "")),
        (b"/v2/models/m/versions/1.0.0%2Bcpu", ("m", "1.0.0+cpu", "")),
        (b"/v2/models/m/versions/1.0.0+cpu/ready", ("m", "1.0.0+cpu", "")),
        (b"/v2/models/se%61rch", ("search", "", "")),
        (b"/%762/models/search/ready", ("search", "", "")),
        (b"/raftmeta/v1/vector/search", ("", "", "search")),
        (b"/v2/", ("", "", "")),
    ],
)
def test_a_path_is_split_first_and_its_segments_decoded_then(path: bytes, names: tuple[str, str, str]) -> None:
    assert find(path, "GET")[1:] == names


@pytest.mark.parametrize(
    "path",
    [
        b"",
        b"/",
        b"/nothing",
        b"//livez",
        b"/livez/",
        b"/v2/models",
        b"/v2/models/",
        b"/v2/models/M",
        b"/v2/models/../x",
        b"/v2/models/a%2Fready",
        b"/v2/models/a%00",
        b"/v2/models/%ff",
        b"/v2/models/%zz",
        b"/v2/models/m/other",
        b"/v2/models/m/versions",
        b"/v2/models/m/versions/",
        b"/v2/models/m/versions/a%20b/infer",
        b"/v2/models/m/infer/x",
        b"/v2/health",
        b"/raftmeta/v1/vector/",
        b"/raftmeta/v1/vector/S",
        b"/raftmeta/v1/plan",
    ],
)
def test_other_paths_are_not_found_whatever_the_method(path: bytes) -> None:
    for method in ("GET", "POST", "DELETE"):
        assert refusal(path, method).status == 404


@pytest.mark.parametrize("row", ROUTES, ids=lambda row: row.path)
def test_a_method_that_a_path_does_not_take_is_answered_with_those_that_it_takes(row: object) -> None:
    path = row.path.replace("{model}", "m").replace("{version}", "1").replace("{deployment}", "d").encode()  # type: ignore[attr-defined]
    for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "get"):
        if method in row.methods:  # type: ignore[attr-defined]
            assert find(path, method).row == row
        else:
            refused = refusal(path, method)
            assert (refused.status, refused.headers) == (405, ((b"allow", ", ".join(row.methods).encode()),))  # type: ignore[attr-defined]


def test_every_route_asks_for_an_action_of_the_one_table_and_only_infer_takes_a_body() -> None:
    assert {row.action for row in ROUTES} == {"infer", "inspect", "health", "metrics"} <= set(ACTIONS)
    assert {row.kind for row in ROUTES if "POST" in row.methods} == {Kind.INFER}


@pytest.mark.parametrize(("path", "is_theirs"), [(b"/v2", 1), (b"/v2/x", 1), (b"/%762/x", 1), (b"/v2x", 0), (b"/livez", 0), (b"", 0)])
def test_errors_below_v2_are_the_protocols_and_others_are_not(path: bytes, is_theirs: int) -> None:
    assert speaks_protocol(path) == bool(is_theirs)
