"""`raftmeta cluster status` of a member that does not lead: how far each has come is asked of the one that does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raftmeta.cli.exits import Exit
from raftmeta.cli.main import main
from tests.support.stub_http import Answer, StubServer, always, stub_server
from tests.unit.cli.test_commands import CLUSTER


def shown(follower: StubServer, leader_url: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    rows = [{"id": name, "zone": "a", "role": role, "match_index": -1, "peer_address": "h:1", "api_url": url}
            for name, role, url in (("m1", "leader", leader_url), ("m2", "follower", follower.url))]  # fmt: skip
    seen = CLUSTER | {"member_id": "m2", "role": "follower", "leader_id": "m1", "members": rows}
    follower.routes["GET", "/v1/cluster"] = always(Answer(seen))
    assert main(["cluster", "status", "--json", "--url", follower.url, "--timeout", "1"]) == Exit.OK
    return dict(json.loads(capsys.readouterr().out))


def test_a_followers_table_has_the_match_index_of_the_leader(capsys: pytest.CaptureFixture[str]) -> None:
    with stub_server({}) as follower, stub_server({}) as leader:
        leader.routes["GET", "/v1/cluster"] = always(Answer(CLUSTER))
        seen = shown(follower, leader.url, capsys)
        assert [item["match_index"] for item in seen["members"]] == [9, -1] and seen["match_index_from"] == "m1"
        assert seen["member_id"] == "m2"
        assert main(["cluster", "status", "--url", follower.url]) == Exit.OK
        assert "match index as the leader m1 says it" in capsys.readouterr().out


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "https://127.0.0.1:1"])
def test_a_leader_that_cannot_be_asked_leaves_the_followers_answer(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_server({}) as follower:
        seen = shown(follower, url, capsys)
    assert [item["match_index"] for item in seen["members"]] == [-1, -1] and "match_index_from" not in seen
