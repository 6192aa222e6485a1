"""`raftmeta init`: one directory with everything of a cluster, whole or not at all, read back by whoever will read it."""

from __future__ import annotations

import datetime as dt
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509

from node_agent.config import load as load_agent
from raftmeta.cli.init import AGENT_OFFSET, InitOptions, free_ports, init_cluster, plan_cluster, run
from raftmeta.cli.init_directory import working_directory
from raftmeta.client.config import load as load_client
from raftmeta.config import load as load_server
from raftmeta.core.errors import RaftmetaError
from raftmeta.durable import OsDisk
from raftmeta.log.marker import MARKER_NAME, consume_marker, read_marker
from raftmeta.log.transport import TransportSettings
from raftmeta.security.roles import Role
from raftmeta.security.tls import TlsFiles
from raftmeta.security.tokens import Authorizer
from tests.support.mesh import Mesh

NOW = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
AGENTS = ("a:node-a1", "b:node-b1")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_every_file_is_read_back_by_its_reader(tmp_path: Path) -> None:
    result = run(tmp_path / "cluster", ["a", "b", "c"], InitOptions(agents=AGENTS, artifact_roots=(tmp_path,)))
    configs = [load_server(path) for path in result.servers]
    assert [config.member_id for config in configs] == ["a", "b", "c"]
    assert {config.cluster_id for config in configs} == {result.cluster_id}
    assert [m.id for m in configs[0].members] == ["a", "b", "c"]
    for config, member in zip(configs, configs[0].members, strict=True):
        assert config.peer is not None
        assert (config.api.public_url, config.peer.public_address) == (member.api_url, member.peer_address)
    agents = [load_agent(path) for path in result.agents]
    assert [(agent.node, agent.zone) for agent in agents] == [("node-a1", "a"), ("node-b1", "b")]
    assert agents[0].member_urls == result.urls == load_client(result.client).urls
    assert agents[0].artifact_roots == (tmp_path,)
    for path in (agents[0].ca_file, agents[0].tls_cert, agents[0].tls_key):
        assert path is not None
        assert path.exists()


def test_the_tokens_are_those_that_the_members_know(tmp_path: Path) -> None:
    result = run(tmp_path / "cluster", ["a", "b", "c"], InitOptions(agents=AGENTS))
    for server in result.servers:
        authorizer = Authorizer(load_server(server).principals_file)
        admin = load_client(result.client).token()
        assert admin is not None
        assert authorizer.authenticate(admin).role is Role.ADMIN
        for role in ("operator", "publisher", "reader", "checker", "inference"):
            token = (result.directory / "tokens" / f"{role}.token").read_text().strip()
            assert authorizer.authenticate(token).role == role
        for agent in map(load_agent, result.agents):
            caller = authorizer.authenticate(agent.token() or "")
            authorizer.require(caller, "attest", f"nodes/{agent.node}/attestations")


def test_a_node_knows_the_same_tokens_and_keeps_none_of_them_but_its_own(tmp_path: Path) -> None:
    result = run(tmp_path / "cluster", ["a", "b", "c"], InitOptions(agents=("a:node-a1@g1",), hosts=("h1", "h2", "h3")))
    agent = load_agent(result.agents[0])
    assert agent.principals_file == result.agents[0].parent / "principals.toml"
    assert mode(agent.principals_file) == 0o600
    authorizer = Authorizer(agent.principals_file)
    tokens = {path.stem: path.read_text().strip() for path in (result.directory / "tokens").iterdir()}
    assert {role: authorizer.authenticate(token).role for role, token in tokens.items()} == {role: Role(role) for role in tokens}
    authorizer.require(authorizer.authenticate(tokens["inference"]), "infer", "models/search")
    authorizer.require(authorizer.authenticate(tokens["checker"]), "inspect", "vector/search")
    for path in result.agents[0].parent.rglob("*"):
        assert path.is_dir() or not any(token.encode() in path.read_bytes() for token in tokens.values()), path


def test_members_link_up_with_what_init_wrote(tmp_path: Path) -> None:
    result = run(tmp_path / "cluster", ["a", "b", "c"])
    with Mesh(tmp_path / "mesh", result.cluster_id) as mesh:
        for server in result.servers:
            config = load_server(server)
            peer = config.peer
            assert peer is not None
            assert peer.certificate is not None
            assert peer.key is not None
            assert peer.authority is not None
            mesh.add(config.member_id, files=TlsFiles(peer.certificate, peer.key, peer.authority))
        mesh.introduce()
        mesh.pump(mesh.linked)
        mesh.everybody_talks()
    assert isinstance(TransportSettings(result.cluster_id, "a", "127.0.0.1:0").incarnation, int)


def test_secrets_are_readable_by_the_owner_only(tmp_path: Path) -> None:
    result = run(tmp_path / "cluster", ["a", "b", "c"], InitOptions(agents=AGENTS))
    for path in result.directory.rglob("*"):
        if path.is_dir():
            assert mode(path) == 0o700, path
        else:
            assert mode(path) == (0o644 if path.name.endswith(".pem") else 0o600), path
    keys = sorted(path.name for path in result.directory.rglob("*.key"))
    assert keys == ["ca.key", "member.key", "member.key", "member.key", "node.key", "node.key"]


def test_the_authoritys_key_is_in_no_folder_that_goes_to_a_machine(tmp_path: Path) -> None:
    result = run(tmp_path / "cluster", ["a"], InitOptions(agents=("a:n1",)))
    key = (result.directory / "authority" / "ca.key").read_bytes()
    others = [path for path in result.directory.rglob("*") if path.is_file() and path.parent.name != "authority"]
    assert len(others) > 10
    assert not any(key[40:120] in path.read_bytes() for path in others)


def test_the_marker_names_the_initial_members_and_is_used_up_once(tmp_path: Path) -> None:
    result = run(tmp_path / "cluster", ["a", "b", "c"])
    disk = OsDisk()
    data_dir = load_server(result.servers[1]).data_dir
    marker = read_marker(disk, data_dir)
    assert marker is not None
    assert (marker.cluster_id, marker.configuration.ids) == (result.cluster_id, ("a", "b", "c"))
    consume_marker(disk, data_dir)
    consume_marker(disk, data_dir)
    assert read_marker(disk, data_dir) is None


def test_a_damaged_marker_is_an_integrity_fault(tmp_path: Path) -> None:
    result = run(tmp_path / "cluster", ["a"])
    path = load_server(result.servers[0]).data_dir / MARKER_NAME
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    with pytest.raises(RaftmetaError) as caught:
        read_marker(OsDisk(), path.parent)
    assert caught.value.code == "integrity"


@pytest.mark.parametrize("kind", ["directory", "file", "dangling link"])
def test_what_stands_there_already_is_refused_and_left_alone(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "cluster"
    if kind == "directory":
        target.mkdir()
        (target / "precious").write_text("x")
    elif kind == "file":
        target.write_text("x")
    else:
        target.symlink_to(tmp_path / "nowhere")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(RaftmetaError, match="exists already"):
        run(target, ["a"])
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_all_faults_of_a_request_are_told_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    options = InitOptions(hosts=("h a", "hb"), agents=("a:X", "z:n1", "a:n2", "a:n2", "a:n3@"), base_port=70_000)
    with pytest.raises(RaftmetaError) as caught:
        run(tmp_path / "cluster", ["A", "agents", "a"], options)
    for part in (
        "zone 'A'",
        "'agents' is reserved",
        "host 'h a'",
        "2 hosts for 3 zones",
        "agent 'a:X'",
        "agent 'z:n1' names a zone",
        "'n2' is given 2 times",
        "agent 'a:n3@'",
        "base port 70000",
    ):
        assert part in caught.value.detail
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("zones", "fault"), [([], "0 zones"), (["a"] * 10, "10 zones"), (["a-2", "a", "a"], "'a-2' would exist twice")])
def test_the_number_and_the_names_of_members_are_bounded(zones: list[str], fault: str) -> None:
    with pytest.raises(RaftmetaError, match=fault):
        plan_cluster(zones, InitOptions())


def test_a_failure_while_writing_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir()
    options = InitOptions(agents=("a:" + "n" * 128,), hosts=("h" * 64 + ".example",))  # a DNS label has at most 63 characters
    try:
        init_cluster(tmp_path / "closed" / "cluster", ["a"], options, NOW.replace(year=9999))  # no certificate lasts so long
    except (RaftmetaError, OverflowError, ValueError):
        assert list((tmp_path / "closed").iterdir()) == []
    else:
        pytest.fail("expected the certificates to be impossible")


def test_two_members_in_a_zone_get_names_of_their_own() -> None:
    plan = plan_cluster(["a", "a", "b"], InitOptions())
    assert [(m.spec.id, m.spec.zone) for m in plan.members] == [("a", "a"), ("a-2", "a"), ("b", "b")]


def test_ports_rise_on_one_host_and_repeat_on_different_hosts() -> None:
    local = plan_cluster(["a", "b"], InitOptions(base_port=8000, agents=AGENTS))
    assert [(m.api_listen, m.peer_listen) for m in local.members] == [
        ("127.0.0.1:8000", "127.0.0.1:8100"),
        ("127.0.0.1:8001", "127.0.0.1:8101"),
    ]
    assert [agent.listen for agent in local.agents] == [f"127.0.0.1:{8000 + AGENT_OFFSET}", f"127.0.0.1:{8000 + AGENT_OFFSET + 1}"]
    spread = plan_cluster(["a", "b"], InitOptions(base_port=8000, hosts=("10.0.0.1", "zone-b.example"), agents=("a:n1@10.0.0.9", "b:n2")))
    assert [m.peer_listen for m in spread.members] == ["10.0.0.1:8100", "0.0.0.0:8100"]
    assert [m.spec.peer_address for m in spread.members] == ["10.0.0.1:8100", "zone-b.example:8100"]
    assert [m.spec.api_url for m in spread.members] == ["https://10.0.0.1:8000", "https://zone-b.example:8000"]
    assert [agent.listen for agent in spread.agents] == ["10.0.0.9:8200", "0.0.0.0:8200"]


def test_free_ports_are_all_different() -> None:
    plan = plan_cluster(["a", "b", "c"], InitOptions(base_port=0, agents=AGENTS))
    listens = [*(m.api_listen for m in plan.members), *(m.peer_listen for m in plan.members), *(a.listen for a in plan.agents)]
    assert len(set(listens)) == 8
    assert len(set(free_ports(20))) == 20


def test_hosts_stand_in_the_certificates(tmp_path: Path) -> None:
    result = init_cluster(tmp_path / "cluster", ["a", "b"], InitOptions(hosts=("fd00::1", "zone-b.example")), NOW)
    names = []
    for member in "ab":
        certificate = x509.load_pem_x509_certificate((result.directory / member / "member.pem").read_bytes())
        value = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names.append([*value.get_values_for_type(x509.DNSName), *map(str, value.get_values_for_type(x509.IPAddress))])
        assert value.get_values_for_type(x509.UniformResourceIdentifier) == [f"raftmeta://{result.cluster_id}/member/{member}"]
    assert names == [["localhost", "fd00::1", "127.0.0.1"], ["zone-b.example", "localhost", "127.0.0.1"]]
    assert load_server(result.servers[0]).api.public_url == "https://[fd00::1]:7400"


def test_a_members_folder_can_be_moved(tmp_path: Path) -> None:
    result = run(tmp_path / "cluster", ["a"])
    moved = (result.directory / "a").rename(tmp_path / "elsewhere")
    config = load_server(moved / "server.toml")
    assert config.data_dir == moved / "data"
    assert config.peer is not None
    assert config.peer.key == moved / "member.key"


def test_odd_directory_names_survive_the_files(tmp_path: Path) -> None:
    result = run(tmp_path / 'clu"ster \\ é', ["a"], InitOptions(agents=("a:n1",)))
    agent = load_agent(result.agents[0])
    assert agent.token_file is not None
    assert agent.token_file.exists()
    with pytest.raises(RaftmetaError, match="do not print"):
        run(tmp_path / "a\nb", ["a"])


def test_of_two_at_once_the_slower_is_told_that_the_directory_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "cluster"
    first = OsDisk.rename

    def rename(self: OsDisk, source: Path, to: Path) -> None:
        if to == target:
            monkeypatch.setattr(OsDisk, "rename", first)
            run(target, ["b"])  # takes its whole turn between the other's first look and its last step
        first(self, source, to)

    monkeypatch.setattr(OsDisk, "rename", rename)
    with pytest.raises(RaftmetaError, match="exists already; init makes a new directory") as refused:
        run(target, ["a"])
    assert refused.value.code == "bad_field"
    assert [path.name for path in tmp_path.iterdir()] == ["cluster"]
    assert (target / "b").exists() and not (target / "a").exists()


def test_what_a_killed_one_left_is_removed_by_the_next_and_what_another_one_works_in_is_not(tmp_path: Path) -> None:
    left, foreign = tmp_path / ".cluster.0123abcd.tmp", tmp_path / ".other.0123abcd.tmp"
    for path in (left, foreign):
        (path / "authority").mkdir(parents=True)
        (path / "authority" / "ca.key").write_text("secret")
    with working_directory(tmp_path / "cluster") as in_use:
        run(tmp_path / "cluster", ["a"])
        assert in_use.exists() and foreign.exists() and not left.exists()


def test_a_signal_that_ends_it_leaves_nothing_behind(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from raftmeta.cli import init
init._write_member = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
init.run(Path(sys.argv[1]), ["a"])
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "cluster")], capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert list(tmp_path.iterdir()) == []
