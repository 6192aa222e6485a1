"""Who may ask a node what: each route with each role, refusals before the body is read, and a table that changes while the node serves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from node_agent.admission import Admission
from node_agent.config import AgentConfig
from node_agent.serve import ServeError
from raftmeta.core.errors import RaftmetaError
from raftmeta.security.roles import Role
from raftmeta.security.tokens import new_token, token_digest
from tests.support.front_scene import Scene, refused_unread, run

TOKENS = {role: new_token() for role in Role if role is not Role.SYSTEM}
INFER = {Role.INFERENCE, Role.CHECKER, Role.ADMIN}
INSPECT = {Role.CHECKER, Role.OPERATOR, Role.AGENT, Role.ADMIN}
METRICS = set(TOKENS) - {Role.INFERENCE}
NEEDED = {
    ("POST", "/v2/models/search/infer"): INFER,
    ("POST", "/v2/models/search/versions/0.9.0/infer"): INFER,
    ("GET", "/v2/models/search"): INFER,
    ("GET", "/v2/models/search/versions/0.9.0"): INFER,
    ("GET", "/v2/models/search/ready"): INFER,
    ("GET", "/v2"): INFER,
    ("GET", "/raftmeta/v1/status"): INSPECT,
    ("GET", "/raftmeta/v1/slots"): INSPECT,
    ("GET", "/raftmeta/v1/vector/search"): INSPECT,
    ("GET", "/raftmeta/v1/vector"): INSPECT,
    ("GET", "/metrics"): METRICS,
}
OPEN = ("/livez", "/readyz", "/v2/health/live", "/v2/health/ready")


def write_principals(path: Path, tokens: Mapping[Role, str]) -> Path:
    rows = []
    for role, token in tokens.items():
        name = "agent:n1" if role is Role.AGENT else role.value
        rows.append(f'[[principal]]\nname = "{name}"\nrole = "{role.value}"\ntoken_sha256 = "{token_digest(token)}"\n')
    path.write_text("\n".join(rows))
    return path


@pytest.fixture
def principals(tmp_path: Path) -> Path:
    return write_principals(tmp_path / "principals.toml", TOKENS)


def test_a_probe_takes_a_caller_who_may_look_at_the_node(tmp_path: Path, principals: Path) -> None:
    async def work(scene: Scene) -> None:
        for role, token in TOKENS.items():
            reply = await scene.infer(**{"authorization": f"Bearer {token}", "x-raftmeta-probe": "1"})
            assert reply.status_code == (200 if role in INFER & INSPECT else 403), role

    run(tmp_path / "node", work, principals_file=principals)


async def ask(scene: Scene, method: str, path: str, token: str | None) -> httpx.Response:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    if method == "POST":
        return await scene.infer(path, **headers)
    return await scene.http.request(method, path, headers=headers)


def test_each_route_takes_the_roles_of_its_action_and_no_other(tmp_path: Path, principals: Path) -> None:
    async def work(scene: Scene) -> None:
        for (method, path), allowed in NEEDED.items():
            for role, token in TOKENS.items():
                reply = await ask(scene, method, path, token)
                if role in allowed:
                    assert reply.status_code == 200, (path, role, reply.text)
                    continue
                assert reply.status_code == 403, (path, role)
                said = reply.json()["error" if path.startswith("/v2") else "detail"]
                assert all(name.value in said for name in allowed), "it names the roles that may"
                assert "insufficient_scope" in reply.headers["www-authenticate"]
        assert len(scene.worker.calls) == 2 * len(INFER)

    run(tmp_path / "node", work, principals_file=principals)


def test_without_a_token_or_with_a_wrong_one_nothing_but_health_is_answered(tmp_path: Path, principals: Path) -> None:
    wrong = {
        "unknown": f"Bearer {new_token()}",
        "cut": f"Bearer {TOKENS[Role.ADMIN][:-1]}",
        "digest": f"Bearer {token_digest(TOKENS[Role.ADMIN])}",
        "basic": f"Basic {TOKENS[Role.ADMIN]}",
        "bare": TOKENS[Role.ADMIN],
        "empty": "Bearer ",
        "long": "Bearer " + "x" * 5000,
    }

    async def work(scene: Scene) -> None:
        for method, path in NEEDED:
            for header in (None, *wrong.values()):
                headers = {} if header is None else {"authorization": header}
                reply = await (scene.infer(path, **headers) if method == "POST" else scene.http.get(path, headers=headers))
                assert reply.status_code == 401, (path, header)
                assert reply.headers["www-authenticate"].startswith('Bearer realm="raftmeta"')
                assert ("invalid_token" in reply.headers["www-authenticate"]) == (header is not None)
                if path.startswith("/v2"):
                    assert set(reply.json()) == {"error"}
                else:
                    assert reply.headers["content-type"] == "application/problem+json"
                    assert (reply.json()["code"], reply.json()["class"]) == ("unauthenticated", "invalid")
        for path in OPEN:
            assert (await scene.http.get(path)).status_code == 200
        assert scene.worker.calls == [] and scene.control.asked == []
        page = (await ask(scene, "GET", "/metrics", TOKENS[Role.READER])).text
        assert f'raftmeta_agent_denied_requests_total{{action="inspect",status="401"}} {4.0 * (1 + len(wrong))}' in page

    run(tmp_path / "node", work, principals_file=principals)


def test_two_authorization_headers_are_refused(tmp_path: Path, principals: Path) -> None:
    admission = Admission(config_with(tmp_path, principals))
    header = (b"authorization", f"Bearer {TOKENS[Role.ADMIN]}".encode())
    admission.admit("infer", [header])
    with pytest.raises(ServeError) as refused:
        admission.admit("infer", [header, header])
    assert refused.value.status == 401


@pytest.mark.parametrize(("token", "status"), [(None, 401), (TOKENS[Role.READER], 403)], ids=["nobody", "a reader"])
@pytest.mark.parametrize("framing", [(b"content-length", b"100"), (b"transfer-encoding", b"chunked")], ids=["sized", "chunked"])
def test_nothing_of_a_body_is_read_before_its_caller_is_known(
    tmp_path: Path, principals: Path, token: str | None, status: int, framing: tuple[bytes, bytes]
) -> None:
    async def work(scene: Scene) -> None:
        headers = [(b"content-type", b"application/json"), framing]
        headers += [(b"authorization", f"Bearer {token}".encode())] if token else []
        found, answered = await refused_unread(scene, headers)
        assert found == status
        assert (b"connection", b"close") in answered, "what is unread cannot be told from a next request"

    run(tmp_path / "node", work, principals_file=principals)


def test_whether_a_model_exists_is_told_to_nobody_who_may_not_ask_it(tmp_path: Path, principals: Path) -> None:
    async def work(scene: Scene) -> None:
        for path in ("/v2/models/search", "/v2/models/other"):
            assert (await scene.http.get(path)).status_code == 401
        assert (await ask(scene, "GET", "/v2/models/other", TOKENS[Role.INFERENCE])).status_code == 404

    run(tmp_path / "node", work, principals_file=principals)


def test_health_and_metrics_are_open_or_not_as_the_settings_say(tmp_path: Path, principals: Path) -> None:
    async def closed(scene: Scene) -> None:
        assert [(await scene.http.get(path)).status_code for path in OPEN] == [401] * len(OPEN)
        for token in TOKENS.values():
            assert [(await ask(scene, "GET", path, token)).status_code for path in OPEN] == [200] * len(OPEN)
        assert (await scene.http.get("/metrics")).status_code == 200

    run(tmp_path / "node", closed, principals_file=principals, health_without_token=False, metrics_without_token=True)


def test_without_a_file_of_principals_everything_is_open_and_a_token_is_not_looked_at(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        for method, path in NEEDED:
            for token in (None, new_token()):
                assert (await ask(scene, method, path, token)).status_code == 200

    run(tmp_path / "node", work)


def config_with(tmp_path: Path, principals: Path) -> AgentConfig:
    values: dict[str, Any] = {"node": "n1", "zone": "a", "member_urls": ["http://127.0.0.1:1"], "store_dir": tmp_path / "store"}
    return AgentConfig(**values, principals_file=principals)


class Ticks:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_replaced_file_counts_without_a_restart_and_one_that_cannot_be_read_changes_nothing(tmp_path: Path, principals: Path) -> None:
    ticks = Ticks()
    admission = Admission(config_with(tmp_path, principals), ticks)
    old, new = TOKENS[Role.INFERENCE], new_token()

    def may(token: str) -> bool:
        ticks.now += 2.0
        try:
            admission.admit("infer", [(b"authorization", f"Bearer {token}".encode())])
        except ServeError:
            return False
        return True

    assert (may(old), may(new)) == (True, False)
    fresh = write_principals(tmp_path / "fresh", {Role.INFERENCE: new})
    fresh.rename(principals)
    assert (may(old), may(new)) == (False, True)
    principals.write_text("[[principal]]")
    assert (may(old), may(new)) == (False, True)


def test_a_plain_token_in_the_file_is_refused_at_the_start(tmp_path: Path, principals: Path) -> None:
    principals.write_text('[[principal]]\nname = "ci"\nrole = "inference"\ntoken = "secret"\n')
    with pytest.raises(RaftmetaError, match="token_sha256"):
        Admission(config_with(tmp_path, principals))
