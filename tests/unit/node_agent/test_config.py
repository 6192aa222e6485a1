from __future__ import annotations

from pathlib import Path

import pytest

from node_agent.config import AgentConfig, load
from node_agent.engine import known
from raftmeta.core.errors import RaftmetaError

GOOD = """
node = "gpu-a1"
zone = "a"
member_urls = ["https://10.0.0.1:7400", "https://10.0.0.2:7400"]
store_dir = "/var/lib/raftmeta"
artifact_roots = ["/srv/models"]
"""


def config(tmp_path: Path, text: str = GOOD) -> AgentConfig:
    path = tmp_path / "agent.toml"
    path.write_text(text)
    return load(path)


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(RaftmetaError) as refused:
        config(tmp_path, text)
    assert refused.value.code == "bad_field"
    return refused.value.detail


def test_a_file_with_the_needed_fields_is_enough(tmp_path: Path) -> None:
    found = config(tmp_path)
    assert (found.node, found.zone, found.workers, found.host_port) == ("gpu-a1", "a", 1, ("127.0.0.1", 8100))
    assert found.sockets_dir == Path("/var/lib/raftmeta/run")
    assert found.public_url(9000) == "http://127.0.0.1:9000"
    assert found.token() is None


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    text = 'node = "A"\nzone = "a"\nmember_urls = ["ftp://x"]\nlisten = "nowhere"\nworkers = 0\nsurprise = 1\nartifact_roots = ["rel"]\n'
    detail = refusal(tmp_path, text)
    for field in ("node", "member_urls", "listen", "workers", "surprise", "artifact_roots", "store_dir"):
        assert field in detail


@pytest.mark.parametrize("listen", ["127.0.0.1:70000", "host name:1", "[::1]", "127.0.0.1:x"])
def test_an_address_that_is_none_is_refused(tmp_path: Path, listen: str) -> None:
    assert "listen" in refusal(tmp_path, GOOD + f'listen = "{listen}"\n')


def test_an_ipv6_address_is_taken(tmp_path: Path) -> None:
    found = config(tmp_path, GOOD + 'listen = "[::1]:9000"\n')
    assert found.host_port == ("::1", 9000)
    assert found.public_url(9000) == "http://[::1]:9000"


def test_listening_on_every_address_needs_the_one_that_others_use(tmp_path: Path) -> None:
    everywhere = GOOD + 'listen = "0.0.0.0:9000"\nlisten_without_tokens = true\n'
    assert "set url" in refusal(tmp_path, everywhere)
    found = config(tmp_path, everywhere + 'url = "http://gpu-a1:9000"\n')
    assert found.public_url(9000) == "http://gpu-a1:9000"


def test_a_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    assert "tls_cert and tls_key" in refusal(tmp_path, GOOD + 'tls_cert = "/x.pem"\n')


def test_the_environment_overrides_the_file_and_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAFTMETA_AGENT_WORKERS", "3")
    monkeypatch.setenv("RAFTMETA_AGENT_MEMBER_URLS", '["http://127.0.0.1:1"]')
    assert config(tmp_path).workers == 3
    assert config(tmp_path).member_urls == ("http://127.0.0.1:1",)
    monkeypatch.setenv("RAFTMETA_AGENT_WORKERS", "many")
    assert "workers" in refusal(tmp_path, GOOD)
    monkeypatch.setenv("RAFTMETA_AGENT_MEMBER_URLS", "not json")
    assert "member_urls" in refusal(tmp_path, GOOD)


@pytest.mark.parametrize("text", ["node = ", "\x00"])
def test_what_is_no_toml_is_refused(tmp_path: Path, text: str) -> None:
    assert "no readable TOML" in refusal(tmp_path, text)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RaftmetaError, match=r"agent\.toml"):
        load(tmp_path / "agent.toml")


def test_the_token_is_one_line_of_visible_characters(tmp_path: Path) -> None:
    token = tmp_path / "token"
    found = config(tmp_path, GOOD + f'token_file = "{token}"\n')
    with pytest.raises(RaftmetaError, match="cannot be read"):
        found.token()
    token.write_text("secret\n")
    assert found.token() == "secret"
    token.write_text("two words\n")
    with pytest.raises(RaftmetaError, match="blanks"):
        found.token()


def test_an_s3_key_comes_with_its_secret_and_an_endpoint_is_a_url(tmp_path: Path) -> None:
    assert "s3_access_key_id and s3_secret_file" in refusal(tmp_path, GOOD + 's3_access_key_id = "AKID"\n')
    assert "s3_endpoint" in refusal(tmp_path, GOOD + 's3_endpoint = "minio:9000"\n')
    found = config(tmp_path, GOOD + 's3_endpoint = "https://[::1]:9000"\ns3_access_key_id = "AKID"\ns3_secret_file = "secret"\n')
    assert found.s3.secret_file == tmp_path / "secret"
    assert found.s3.endpoint == "https://[::1]:9000"


CERTIFICATE = 'tls_cert = "node.pem"\ntls_key = "node.key"\n'


@pytest.mark.parametrize("host", ["10.0.0.7", "gpu-a1", "0.0.0.0", "[::]", "[2001:db8::1]"])
def test_a_port_that_others_reach_needs_tokens_and_a_certificate_or_says_that_everybody_may_ask(tmp_path: Path, host: str) -> None:
    text = GOOD + f'listen = "{host}:9000"\nurl = "https://gpu-a1:9000"\n'
    assert "listen_without_tokens = true" in refusal(tmp_path, text)
    assert "listen_without_tokens = true" in refusal(tmp_path, text + CERTIFICATE)
    assert "tokens need tls_cert and tls_key" in refusal(tmp_path, text + 'principals_file = "principals.toml"\n')
    assert config(tmp_path, text + "listen_without_tokens = true\n").principals_file is None
    assert config(tmp_path, text + CERTIFICATE + 'principals_file = "principals.toml"\n').principals_file == tmp_path / "principals.toml"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "[::1]"])
def test_on_loopback_tokens_and_a_certificate_may_be_left_out(tmp_path: Path, host: str) -> None:
    assert config(tmp_path, GOOD + f'listen = "{host}:9000"\n').listen_without_tokens is False
    assert config(tmp_path, GOOD + f'listen = "{host}:9000"\nprincipals_file = "principals.toml"\n').principals_file is not None


def test_settings_that_contradict_each_other_are_all_told_at_once(tmp_path: Path) -> None:
    detail = refusal(tmp_path, GOOD + 'listen = "0.0.0.0:9000"\ntls_cert = "c"\ns3_access_key_id = "AKID"\n')
    for part in ("principals_file is needed", "belong together", "s3_secret_file", "set url"):
        assert part in detail


def test_settings_of_the_port_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    assert "contradicts" in refusal(tmp_path, GOOD + 'listen_without_tokens = true\nprincipals_file = "p"\n')
    assert "takes a principals_file" in refusal(tmp_path, GOOD + "health_without_token = false\n")


def test_engines_are_those_named_or_all_whose_library_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert known.chosen(config(tmp_path).engines) == ("hf", "torch_module")
    assert known.chosen(config(tmp_path, GOOD + 'engines = ["torch_module"]\n').engines) == ("torch_module",)
    monkeypatch.setattr(known, "find_spec", lambda name: None if name == "transformers" else name)
    assert known.chosen(config(tmp_path).engines) == ("torch_module",)


@pytest.mark.parametrize(
    ("text", "missing", "expected"),
    [
        ('["onnx"]', (), "'onnx' is none of hf, torch_module"),
        ('["hf", "hf"]', (), "twice"),
        ('["torch_module", "hf"]', ("transformers",), "hf needs transformers, which is not installed: pip install 'raftmeta[agent-hf]'"),
        ('["torch_module"]', ("torch",), "torch_module needs torch, which is not installed: pip install 'raftmeta[agent]'"),
        ("[]", ("torch",), "no library that computes is installed"),
    ],
)
def test_engines_that_a_node_cannot_have_are_refused(
    text: str, missing: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "find_spec", lambda name: None if name in missing else name)
    assert expected in refusal(tmp_path, GOOD + f"engines = {text}\n")
