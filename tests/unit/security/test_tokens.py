"""Tokens and roles: the table says what each role may do, a token proves a principal, and everything else is refused."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from raftmeta.core import commands as c
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.types import Basis, Phase, Policy, Side, SideName, Stage, StageCounters, VectorFrom, VersionSummary
from raftmeta.security.roles import ACTIONS, COMMAND_ACTIONS, Principal, Role, node_of_resource, permitted
from raftmeta.security.tokens import ANONYMOUS, Authorizer, load_principals, new_token, token_digest

TOKENS = {name: new_token() for name in ("ann", "oz", "pat", "rex", "cron", "app", "agent:n1", "agent:n2")}
ROLES = {
    "ann": "admin",
    "oz": "operator",
    "pat": "publisher",
    "rex": "reader",
    "cron": "checker",
    "app": "inference",
    "agent:n1": "agent",
    "agent:n2": "agent",
}

ALLOWED = {
    "read": {"ann", "oz", "pat", "rex", "cron", "agent:n1", "agent:n2"},
    "watch": {"ann", "oz", "pat", "rex", "cron", "agent:n1", "agent:n2"},
    "metrics": {"ann", "oz", "pat", "rex", "cron", "agent:n1", "agent:n2"},
    "publish": {"ann", "pat"},
    "delete": {"ann", "pat"},
    "declare": {"ann", "oz"},
    "activate": {"ann", "oz"},
    "rollback": {"ann", "oz"},
    "failover": {"ann", "oz"},
    "abort": {"ann", "oz"},
    "verdict": {"ann", "oz", "cron"},
    "heartbeat": {"agent:n1"},
    "attest": {"agent:n1"},
    "evidence": {"agent:n1"},
    "advance": set(),
    "feature_level": {"ann"},
    "members": {"ann"},
    "infer": {"ann", "app", "cron"},
    "inspect": {"ann", "oz", "cron", "agent:n1", "agent:n2"},
    "health": {"ann", "oz", "pat", "rex", "cron", "app", "agent:n1", "agent:n2"},
}
RESOURCE = {"heartbeat": "nodes/n1/heartbeat", "attest": "nodes/n1/attestations", "evidence": "nodes/n1/evidence"}

SUMMARY = VersionSummary("c", "d", "w", "r", "m", 1, 1, 1, 1)
PUBLISH = c.Publish("m", "1", SUMMARY, b"")
BODIES: dict[str, c.Body] = {
    "publish": PUBLISH,
    "publish batch": c.PublishBatch((PUBLISH,)),
    "delete": c.DeleteVersion("m", "1"),
    "declare": c.DeclareDeployment("d", "m", Side("a", ("n1",)), None, Policy()),
    "activate": c.Activate("d", "1", None, "r"),
    "rollback": c.RollBack("d", None, "r"),
    "attest": c.Attest("r", "n1", SideName.PRIMARY, Stage.PREPARED, "c", "", "boot", StageCounters(), "", ""),
    "advance": c.AdvanceRollout("r", Phase.PREPARING),
    "abort": c.AbortRollout("r", "code", "", ""),
    "verdict": c.RecordVerdict("d", "consistent", b"{}"),
    "feature_level": c.RaiseFeatureLevel(2),
    "failover": c.FailOver("d", SideName.STANDBY, None, 1, False),
    "check": c.RecordCheck("d", "incomplete", "", b"{}", Basis(0, 0, "", 0, 0)),
    "evidence": c.RecordEvidence("d", "n1", 0, 0, "", "", "", VectorFrom.MEMORY, "", "", "", "b", 0, 0, ""),
}


class Ticks:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def principals_text(tokens: dict[str, str], roles: dict[str, str] = ROLES) -> str:
    rows = [f'[[principal]]\nname = "{n}"\nrole = "{roles[n]}"\ntoken_sha256 = "{token_digest(t)}"\n' for n, t in tokens.items()]
    return "\n".join(rows)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "principals.toml"
    file.write_text(principals_text(TOKENS))
    return file


def refused(call: Callable[[], object], code: str) -> bool:
    try:
        call()
    except RaftmetaError as error:
        assert error.code == code
        return True
    return False


def test_a_token_has_256_bits_and_stands_nowhere_in_the_members_file(path: Path) -> None:
    assert len(new_token()) == 43
    assert len({new_token() for _ in range(100)}) == 100
    assert not any(token in path.read_text() for token in TOKENS.values())


def test_each_token_proves_its_principal_and_no_other_string_does(path: Path) -> None:
    authorizer = Authorizer(path)
    for name, token in TOKENS.items():
        assert authorizer.authenticate(token) == Principal(name, Role(ROLES[name]))
    for wrong in ("", "x", TOKENS["ann"][:-1], TOKENS["ann"] + "x", TOKENS["ann"].swapcase(), token_digest(TOKENS["ann"]), "\udcff", "ä"):
        assert refused(lambda wrong=wrong: authorizer.authenticate(wrong), "unauthenticated")  # type: ignore[misc]


@pytest.mark.parametrize("action", sorted(ACTIONS))
@pytest.mark.parametrize("name", sorted(TOKENS))
def test_each_role_may_do_what_the_table_says_and_nothing_else(path: Path, name: str, action: str) -> None:
    authorizer = Authorizer(path)
    caller = authorizer.authenticate(TOKENS[name])
    resource = RESOURCE.get(action, "models/m")
    assert refused(lambda: authorizer.require(caller, action, resource), "forbidden") == (name not in ALLOWED[action])


def test_a_refusal_names_the_roles_that_may(path: Path) -> None:
    authorizer = Authorizer(path)
    agent = authorizer.authenticate(TOKENS["agent:n1"])
    for action, resource, says in (
        ("activate", "deployments/d/activate", "this takes admin or operator"),
        ("heartbeat", "nodes/n2/heartbeat", "this takes the agent of that node"),
        ("advance", "x", "this takes the members themselves"),
    ):
        with pytest.raises(RaftmetaError, match=says):
            authorizer.require(agent, action, resource)


def test_the_expected_table_covers_every_action() -> None:
    assert ALLOWED.keys() == ACTIONS.keys()


@pytest.mark.parametrize("action", ["", "destroy", "READ"])
def test_an_action_outside_the_table_is_forbidden_even_for_an_admin(path: Path, action: str) -> None:
    authorizer = Authorizer(path)
    assert refused(lambda: authorizer.require(authorizer.authenticate(TOKENS["ann"]), action, "models/m"), "forbidden")


@pytest.mark.parametrize("resource", ["nodes/n2/heartbeat", "nodes//heartbeat", "nodes", "", "models/n1", "nodes/n1x/beat", "xnodes/n1"])
@pytest.mark.parametrize("action", ["heartbeat", "attest", "evidence"])
def test_an_agent_speaks_for_its_own_node_only(path: Path, action: str, resource: str) -> None:
    authorizer = Authorizer(path)
    caller = authorizer.authenticate(TOKENS["agent:n1"])
    authorizer.require(caller, action, f"nodes/n1/{action}")
    assert refused(lambda: authorizer.require(caller, action, resource), "forbidden")


def test_an_agent_named_like_a_node_without_the_role_speaks_for_none() -> None:
    assert not permitted(Principal("agent:n1", Role.ADMIN), "attest", "n1")
    assert Principal("agent:n1", Role.ADMIN).node == ""
    assert node_of_resource("nodes/n1") == "n1"


@pytest.mark.parametrize("name", sorted(TOKENS))
@pytest.mark.parametrize("kind", sorted(BODIES))
def test_the_leader_judges_a_forwarded_command_by_the_same_table(path: Path, name: str, kind: str) -> None:
    action = COMMAND_ACTIONS[type(BODIES[kind])]
    assert Authorizer(path).permits(name, BODIES[kind]) == (name in ALLOWED[action])


def test_every_command_has_an_action_in_the_table() -> None:
    assert set(COMMAND_ACTIONS) == set(get_args(c.Body)) == {type(body) for body in BODIES.values()}
    assert set(COMMAND_ACTIONS.values()) <= set(ACTIONS)


def test_the_controller_may_advance_and_abort_and_nothing_else(path: Path) -> None:
    permits = Authorizer(path).permits
    assert {kind for kind, body in BODIES.items() if permits("system:controller", body)} == {"advance", "abort"}


def test_a_forwarded_command_of_nobody_is_refused(path: Path) -> None:
    permits = Authorizer(path).permits
    assert not any(permits(name, body) for body in BODIES.values() for name in ("", "mallory", "anonymous", "agent:", "agent:n9"))


def test_a_member_without_principals_knows_only_the_anonymous_admin() -> None:
    authorizer = Authorizer(None)
    caller = authorizer.authenticate("")
    assert caller == ANONYMOUS
    for action in ACTIONS:
        authorizer.require(caller, action, "nodes/n1/heartbeat")
    assert all(authorizer.permits("anonymous", body) for body in BODIES.values())
    assert not any(authorizer.permits("ann", body) for body in BODIES.values())
    assert refused(lambda: authorizer.authenticate("something"), "unauthenticated")


def test_a_member_with_principals_does_not_know_the_anonymous_admin(path: Path) -> None:
    authorizer = Authorizer(path)
    assert refused(lambda: authorizer.authenticate(""), "unauthenticated")
    assert refused(lambda: authorizer.require(ANONYMOUS, "attest", "nodes/n1/attestations"), "forbidden")


def test_a_changed_file_takes_effect_and_a_broken_one_changes_nothing(path: Path) -> None:
    clock = Ticks()
    authorizer = Authorizer(path, clock)
    only_oz = {"oz": TOKENS["oz"]}
    path.write_text(principals_text(only_oz))
    authorizer.authenticate(TOKENS["ann"])  # not looked at again yet
    clock.now += 1.1
    assert refused(lambda: authorizer.authenticate(TOKENS["ann"]), "unauthenticated")
    path.write_text("broken")
    clock.now += 1.1
    assert authorizer.authenticate(TOKENS["oz"]).name == "oz"
    path.unlink()
    clock.now += 1.1
    assert authorizer.permits("oz", BODIES["activate"])


def test_a_file_that_fails_in_a_way_nobody_foresaw_changes_nothing_and_is_told_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = Ticks(), []

    def fail(text: str) -> None:
        looks.append(text)
        raise MemoryError

    authorizer = Authorizer(path, clock)
    monkeypatch.setattr(tomllib, "loads", fail)
    path.write_text("other")
    for _ in range(3):
        clock.now += 1.1
        assert authorizer.permits("oz", BODIES["activate"])
    assert looks == ["other"]


def test_a_principal_may_have_two_tokens_while_one_is_replaced(path: Path) -> None:
    other = new_token()
    path.write_text(principals_text(TOKENS) + principals_text({"ann": other}))
    authorizer = Authorizer(path)
    assert authorizer.authenticate(other) == authorizer.authenticate(TOKENS["ann"])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "1 to 4096"),
        ("principal = 3", "1 to 4096"),
        ("x = 1\n" + principals_text({"ann": "t"}), "1 to 4096"),
        ("no toml", "cannot be read"),
        ("x = " + "[" * 3_000, "cannot be read"),
        ("[[principal]]\nname = 'a'", "expected the strings name, role and token_sha256"),
        (principals_text({"ann": "t"}) + "extra = 1", "expected the strings name, role and token_sha256"),
        (principals_text({"a b": "t"}, {"a b": "admin"}), "visible ASCII"),
        (principals_text({"": "t"}, {"": "admin"}), "visible ASCII"),
        (principals_text({"a": "t"}, {"a": "root"}), "role 'root' is none of"),
        (principals_text({"a": "t"}, {"a": "system"}), "role 'system' is none of"),
        (principals_text({"system:x": "t"}, {"system:x": "admin"}), "reserved"),
        (principals_text({"anonymous": "t"}, {"anonymous": "reader"}), "reserved"),
        (principals_text({"agent:n1": "t"}, {"agent:n1": "admin"}), "role agent belongs to names agent:NODE"),
        (principals_text({"n1": "t"}, {"n1": "agent"}), "role agent belongs to names agent:NODE"),
        (principals_text({"agent:": "t"}, {"agent:": "agent"}), "role agent belongs to names agent:NODE"),
        (principals_text({"ann": "t", "oz": "t"}), "share a token"),
        (principals_text({"ann": "t"}) + principals_text({"ann": "u"}, {"ann": "reader"}), "two roles"),
        (principals_text({"ann": "t"}).replace(token_digest("t"), "abc"), "64 lower-case hex"),
    ],
)
def test_a_faulty_file_of_principals_is_refused_with_the_reason(tmp_path: Path, text: str, fault: str) -> None:
    file = tmp_path / "principals.toml"
    file.write_text(text)
    with pytest.raises(RaftmetaError, match=fault) as caught:
        load_principals(file)
    assert caught.value.code == "bad_field"


def test_all_faults_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "principals.toml"
    file.write_text(principals_text({"a": "t", "b": "u"}, {"a": "root", "b": "boss"}))
    with pytest.raises(RaftmetaError, match=r"principal 1: .*root.*principal 2: .*boss"):
        load_principals(file)


def test_a_missing_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(RaftmetaError, match="cannot be read"):
        Authorizer(tmp_path / "none.toml")
