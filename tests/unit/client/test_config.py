"""Connection settings: who wins, and that all faults of a file are reported at once."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from node_agent.config import load as load_agent
from raftmeta.client import RaftmetaError
from raftmeta.client.config import DEFAULT_URL, Connection, load, resolve
from raftmeta.config import load as load_server

FILE = 'urls = ["https://a:1", "https://b:1"]\nca_file = "ca.pem"\ntoken_file = "sub/t"\ntimeout_s = 5\n'


def test_without_anything_it_is_the_development_member() -> None:
    assert resolve(environ={}) == Connection(urls=(DEFAULT_URL,))


def test_paths_in_the_file_start_at_its_folder(tmp_path: Path) -> None:
    (tmp_path / "client.toml").write_text(FILE)
    expected = Connection(("https://a:1", "https://b:1"), tmp_path / "ca.pem", tmp_path / "sub/t", 5.0)
    assert load(tmp_path / "client.toml") == expected


def test_options_win_over_the_environment_and_the_environment_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "client.toml").write_text(FILE)
    env = {"RAFTMETA_CLIENT_CONFIG": str(tmp_path / "client.toml")}
    assert resolve(environ=env).urls == ("https://a:1", "https://b:1")
    env |= {"RAFTMETA_URL": "http://e:1, http://f:1", "RAFTMETA_TOKEN_FILE": "/t"}
    assert resolve(environ=env).urls == ("http://e:1", "http://f:1")
    assert resolve(environ=env).token_file == Path("/t")
    assert resolve(["http://o:1"], environ=env).urls == ("http://o:1",)
    assert resolve(["http://o:1"], environ=env).ca_file == tmp_path / "ca.pem"


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('url = "x"\nurls = []\nca_file = 3\ntimeout_s = "soon"\n')
    with pytest.raises(RaftmetaError) as raised:
        load(tmp_path / "c.toml")
    for word in ("'url' is no setting", "urls is []", "ca_file is 3", "timeout_s is 'soon'"):
        assert word in raised.value.detail


@pytest.mark.parametrize("content", [b"urls = [", b"\xff\xfe", b"#" * 70_000])
def test_a_file_that_cannot_be_read_as_settings_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c.toml").write_bytes(content)
    with pytest.raises(RaftmetaError) as raised:
        load(tmp_path / "c.toml")
    assert raised.value.code == "bad_field"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RaftmetaError, match="nowhere"):
        resolve(config=tmp_path / "nowhere.toml", environ={})


def test_the_token_is_one_line_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("abc.def\n")
    assert Connection(token_file=tmp_path / "t").token() == "abc.def"
    assert Connection().token() is None
    for bad in ("", "a b", "a\nb", "ü"):
        (tmp_path / "t").write_text(bad)
        with pytest.raises(RaftmetaError):
            Connection(token_file=tmp_path / "t").token()


def test_a_file_that_nests_without_end_is_no_toml(tmp_path: Path) -> None:
    (tmp_path / "client.toml").write_text("urls = " + "[" * 50_000)
    with pytest.raises(RaftmetaError, match="is no TOML") as raised:
        load(tmp_path / "client.toml")
    assert raised.value.code == "bad_field"


KINDS = {"client.toml": FILE, "server.toml": 'member_id = "a"\nzone = "z"\n', "agent.toml": 'node = "a"\nzone = "z"\n'}
LOADERS = {"client.toml": load, "server.toml": load_server, "agent.toml": load_agent}


@pytest.mark.parametrize(("given", "wanted"), list(permutations(KINDS, 2)))
def test_a_file_of_another_kind_is_called_by_its_name(given: str, wanted: str, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(KINDS[given])
    with pytest.raises(RaftmetaError, match=f"looks like an? {given}; an? {wanted} .* is wanted"):
        LOADERS[wanted](tmp_path / "x.toml")
