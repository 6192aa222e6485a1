"""A member's settings: read from one file and the environment, checked as a whole, with every fault told at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from raftmeta.addresses import is_host, is_loopback, join_address, split_address
from raftmeta.config import ApiConfig, InitialMember, Limits, PeerConfig, ServerConfig, Timings, load
from raftmeta.core.errors import RaftmetaError

SINGLE = 'member_id = "a"\nzone = "a"\ndata_dir = "data"\n'
TLS = 'certificate = "m.pem"\nkey = "m.key"\n'
PEER = f'[peer]\nlisten = "127.0.0.1:7500"\n{TLS}authority = "ca.pem"\n'
THREE = "".join(f'[[members]]\nid = "{z}"\nzone = "{z}"\npeer_address = "h{z}:7500"\napi_url = "https://h{z}:7400"\n' for z in "abc")
FULL = f'{SINGLE}cluster_id = "c1"\nprincipals_file = "p.toml"\n[api]\nlisten = "0.0.0.0:7400"\n{TLS}{PEER}{THREE}'


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("RAFTMETA_")]:
        monkeypatch.delenv(name)


def config_of(tmp_path: Path, text: str) -> ServerConfig:
    file = tmp_path / "server.toml"
    file.write_text(text)
    return load(file)


def fault_of(tmp_path: Path, text: str) -> str:
    with pytest.raises(RaftmetaError) as caught:
        config_of(tmp_path, text)
    assert caught.value.code == "bad_field"
    return caught.value.detail


def test_the_smallest_file_is_a_single_member_on_loopback(tmp_path: Path) -> None:
    config = config_of(tmp_path, SINGLE)
    assert (config.member_id, config.zone, config.peer, config.members) == ("a", "a", None, ())
    assert config.api.listen == "127.0.0.1:7400"
    assert config.api.public_url == "http://127.0.0.1:7400"


def test_relative_paths_start_at_the_files_folder_and_absolute_ones_stay(tmp_path: Path) -> None:
    config = config_of(tmp_path, FULL.replace('"p.toml"', '"/etc/p.toml"'))
    assert config.peer is not None
    assert config.data_dir == tmp_path / "data"
    assert config.principals_file == Path("/etc/p.toml")
    assert (config.api.certificate, config.peer.authority) == (tmp_path / "m.pem", tmp_path / "ca.pem")


def test_a_full_file_names_three_members_and_says_where_it_is_reached(tmp_path: Path) -> None:
    config = config_of(tmp_path, FULL)
    assert config.peer is not None
    assert [member.id for member in config.members] == ["a", "b", "c"]
    assert config.api.public_url == "https://0.0.0.0:7400"
    assert config.peer.public_address == "127.0.0.1:7500"


def test_the_environment_overrides_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAFTMETA_LOG_LEVEL", "debug")
    monkeypatch.setenv("RAFTMETA_API__LISTEN", "127.0.0.1:9")
    monkeypatch.setenv("RAFTMETA_TIMINGS__ELECTION_MAX_S", "2.5")
    monkeypatch.setenv("RAFTMETA_ZONE", "")  # empty counts as not given
    config = config_of(tmp_path, SINGLE)
    assert (config.log_level, config.api.listen, config.timings.election_max_s) == ("debug", "127.0.0.1:9", 2.5)
    assert (config.zone, config.timings.election_min_s) == ("a", 1.0)


def test_a_fault_of_the_environment_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAFTMETA_LOG_LEVEL", "loud")
    monkeypatch.setenv("RAFTMETA_LIMITS__REQUESTS", "1")
    detail = fault_of(tmp_path, SINGLE)
    assert "log_level" in detail
    assert "limits.requests" in detail
    monkeypatch.setenv("RAFTMETA_MEMBERS", "[not json")
    assert fault_of(tmp_path, SINGLE).startswith("environment: ")


def test_the_development_member_is_alone_on_loopback_without_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig.development(tmp_path)
    assert (config.data_dir, config.peer, config.principals_file, config.api.certificate) == (tmp_path, None, None, None)
    assert is_loopback(split_address(config.api.listen)[0])
    monkeypatch.setenv("RAFTMETA_API__LISTEN", "0.0.0.0:7400")
    with pytest.raises(RaftmetaError, match=r"development member: .*not loopback"):
        ServerConfig.development(tmp_path)


def test_every_fault_of_the_fields_is_told_at_once(tmp_path: Path) -> None:
    text = """
member_id = "A B"
zone = "z"
log_level = "loud"
surprise = 1
[api]
listen = "nowhere"
url = "ftp://x"
[timings]
heartbeat_s = 0
[limits]
requests = "many"
"""
    detail = fault_of(tmp_path, text)
    for part in ("member_id", "data_dir", "log_level", "surprise", "api.listen", "api.url", "timings.heartbeat_s", "limits.requests"):
        assert part in detail


def test_every_contradiction_is_told_at_once(tmp_path: Path) -> None:
    text = SINGLE + '[api]\nlisten = "0.0.0.0:1"\n[timings]\nelection_min_s = 2.0\nheartbeat_s = 1.0\n' + THREE.replace('"a"', '"d"')
    detail = fault_of(tmp_path, text)
    for part in (
        "api.certificate and api.key are needed",
        "principals_file is needed",
        "[peer] is needed",
        "'a' is not among the members d, b, c",
        "election_max_s 1.5 must exceed",
        "election_min_s 2.0 must be at least 3 times heartbeat_s",
        "link_idle_s 1.5 must be at least 3 times heartbeat_s",
    ):
        assert part in detail


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("cluster_id", "other_id"), "other_id"),
        (('cluster_id = "c1"\n', ""), "needs cluster_id"),
        (('key = "m.key"\nauthority', "authority"), "peer.certificate, peer.key and peer.authority are needed"),
        ((f'"0.0.0.0:7400"\n{TLS}', '"0.0.0.0:7400"\n'), "api.certificate and api.key are needed"),
        ((f'"0.0.0.0:7400"\n{TLS}', '"127.0.0.1:7400"\ncertificate = "m.pem"\n'), "belong together"),
        (('principals_file = "p.toml"\n', ""), "principals_file is needed"),
        (("[peer]\n", "[peer]\nplain = true\n"), "exclude each other"),
        ((f"{TLS}authority", 'plain = true\nadvertise = "10.0.0.1:7500"\n#'), "loopback only, found 127.0.0.1:7500 and 10.0.0.1:7500"),
        (("[peer]\n", "[peer]\nplain = true\n"), "peer.plain"),
        (('id = "b"', 'id = "c"'), "repeat an id: a, c, c"),
        (('peer_address = "hb:7500"', 'peer_address = "hb"'), "members.1.peer_address"),
        (('listen = "0.0.0.0:7400"', 'listen = "0.0.0.0:7400"\nurl = "http://ha:7400"'), "expected https"),
    ],
)
def test_what_would_not_be_safe_or_not_work_is_refused(tmp_path: Path, change: tuple[str, str], fault: str) -> None:
    text = FULL.replace(*change)
    assert text != FULL
    assert fault in fault_of(tmp_path, text)


def test_ten_members_are_too_many(tmp_path: Path) -> None:
    row = '[[members]]\nid = "m{0}"\nzone = "a"\npeer_address = "h:1"\napi_url = "https://h:1"\n'
    rows = "".join(row.format(n) for n in range(10))
    assert "members" in fault_of(tmp_path, FULL.replace(THREE, rows).replace('member_id = "a"', 'member_id = "m0"'))


@pytest.mark.parametrize("data", [b"\xff\xfe", b"no toml", b"a = 1\na = 2", b"a = " + b"[" * 3_000, b"# " + b"x" * (1 << 20)])
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "server.toml"
    file.write_bytes(data)
    with pytest.raises(RaftmetaError, match=r"server\.toml is no readable TOML file"):
        load(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RaftmetaError, match="no readable TOML file"):
        load(tmp_path / "server.toml")


def fields() -> Iterator[tuple[type[BaseModel], str]]:
    for model in (ServerConfig, ApiConfig, PeerConfig, InitialMember, Timings, Limits):
        for name in model.model_fields:
            yield model, name


@pytest.mark.parametrize(("model", "name"), list(fields()))
def test_every_field_is_described_and_carries_its_unit(model: type[BaseModel], name: str) -> None:
    field = model.model_fields[name]
    assert field.description
    assert len(field.description) > 10
    if field.annotation is float:
        assert name.endswith("_s")
        assert "seconds" in field.description or "its upper end" in field.description


@pytest.mark.parametrize(("text", "expected"), [("h:1", ("h", 1)), ("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:65535", ("::1", 65535))])
def test_addresses_are_read_and_written_alike(text: str, expected: tuple[str, int]) -> None:
    assert split_address(text) == expected
    assert join_address(*expected) == text


@pytest.mark.parametrize("text", ["", "h", "h:", ":1", "h:-1", "h:65536", "h:1x", "h:١", "::1:1", "[h]:1", "[::1:1", "a b:1", "h/x:1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        split_address(text)


def test_loopback_is_told_from_the_rest() -> None:
    assert all(is_loopback(host) for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "::", "localhost.example", "example"))
    assert is_host("zone-a.example")
    assert not is_host("a:b")
