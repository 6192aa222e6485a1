"""What is handed out to run the check by a timer: files that are in form, and commands that the command line takes and that work."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from raftmeta.cli.main import main
from tests.support.check_stub import serving_fleet
from tests.support.fake_fleet import FakeFleet
from tests.support.stub_http import StubServer

DEPLOY = Path(__file__).parents[3] / "deploy"
SYSTEMD, CRON, KUBERNETES = (
    DEPLOY / "systemd",
    DEPLOY / "cron" / "raftmeta-check",
    DEPLOY / "kubernetes" / "raftmeta-check-cronjob.yaml",
)
DIRECTORIES = ("/etc/raftmeta", "/run/raftmeta-check", "/var/lib/raftmeta-check", "/var/lib/raftmeta", "/tmp")


class _Unit(configparser.RawConfigParser):
    def __init__(self, path: Path) -> None:
        super().__init__(strict=False, interpolation=None, delimiters=("=",), comment_prefixes=("#",))
        self.optionxform = str  # type: ignore[method-assign, assignment]
        self.read(path)


def cron_lines() -> list[str]:
    lines = CRON.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#") and not re.match(r"[A-Z_]+ *=", line)]


def cron_job() -> Any:
    return yaml.safe_load(KUBERNETES.read_text())


def container() -> Any:
    return cron_job()["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]


def commands() -> Iterator[list[str]]:
    """The words behind `raftmeta` of every command in the files."""
    yield shlex.split(_Unit(SYSTEMD / "raftmeta-check.service")["Service"]["ExecStart"])[1:]
    for line in cron_lines():
        words = shlex.split(line)
        assert words[5:7] == ["raftmeta", "raftmeta"], "user, then program"
        yield words[7 : words.index(">>")]
    yield container()["command"][1:]


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[StubServer]:
    with serving_fleet(FakeFleet()) as server:
        for directory in DIRECTORIES:
            (tmp_path / directory.strip("/")).mkdir(parents=True)
        (tmp_path / "etc/raftmeta/client.toml").write_text(f'urls = ["{server.url}"]\n')
        (tmp_path / "token").write_text("secret\n")
        yield server


@pytest.mark.parametrize("words", list(commands()), ids=lambda words: words[-1])
def test_each_command_is_taken_and_does_what_it_says(
    words: list[str], stub: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAFTMETA_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    moved = [str(tmp_path) + word if word.startswith(DIRECTORIES) else word for word in words]
    assert main(moved) == 0
    assert all(headers["authorization"] == "Bearer secret" for _, _, _, headers in stub.requests)
    for path in (Path(word) for word in moved if word.endswith(".prom")):
        assert "raftmeta_check_exit_status 0" in path.read_text()


def test_the_lines_of_cron_are_in_form_and_end_with_a_newline() -> None:
    assert len(cron_lines()) == 2 and CRON.read_text().endswith("\n")
    for line in cron_lines():
        assert all(re.fullmatch(r"[0-9*/,-]+", field) for field in line.split()[:5])
        assert "%" not in line, "cron takes it for the end of the line"


def test_the_timer_starts_the_service_and_the_service_may_do_little() -> None:
    service, timer = _Unit(SYSTEMD / "raftmeta-check.service"), _Unit(SYSTEMD / "raftmeta-check.timer")
    assert service["Service"]["Type"] == "oneshot", "a run that is still going is not started again"
    for name, value in {"DynamicUser": "yes", "ProtectSystem": "strict", "NoNewPrivileges": "yes", "CapabilityBoundingSet": ""}.items():
        assert service["Service"][name] == value
    written = [word for word in shlex.split(service["Service"]["ExecStart"]) if word.startswith(("/run/", "/var/"))]
    allowed = (f"/run/{service['Service']['RuntimeDirectory']}/", f"/var/lib/{service['Service']['StateDirectory']}/")
    assert written and all(word.startswith(allowed) for word in written)
    assert timer["Timer"]["OnCalendar"] == "*:0/5" and timer["Install"]["WantedBy"] == "timers.target"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_nothing_to_say_about_the_units(tmp_path: Path) -> None:
    for name in ("raftmeta-check.service", "raftmeta-check.timer"):
        (tmp_path / name).write_text((SYSTEMD / name).read_text().replace("/opt/raftmeta/bin/raftmeta", "/bin/true"))
    words = ["systemd-analyze", "verify", *map(str, sorted(tmp_path.iterdir()))]
    environment = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_cron_job_runs_one_at_a_time_as_nobody_and_writes_to_nothing_but_memory() -> None:
    job, spec = cron_job()["spec"], cron_job()["spec"]["jobTemplate"]["spec"]
    assert (cron_job()["apiVersion"], cron_job()["kind"]) == ("batch/v1", "CronJob")
    assert (job["concurrencyPolicy"], job["schedule"], spec["backoffLimit"]) == ("Forbid", "*/5 * * * *", 0)
    pod, inner = spec["template"]["spec"], container()
    assert pod["restartPolicy"] == "Never" and pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
    security = inner["securityContext"]
    assert (security["readOnlyRootFilesystem"], security["allowPrivilegeEscalation"]) == (True, False)
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert set(inner["resources"]) == {"requests", "limits"} and set(inner["resources"]["limits"]) == {"cpu", "memory"}
    assert {mount["name"] for mount in inner["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    writable = [mount["mountPath"] for mount in inner["volumeMounts"] if not mount.get("readOnly")]
    assert writable == ["/tmp"] and inner["command"][-1].startswith("/tmp/")
    environment = {item["name"]: item["value"] for item in inner["env"]}
    assert environment["RAFTMETA_TOKEN_FILE"].startswith(
        tuple(mount["mountPath"] for mount in inner["volumeMounts"] if mount["name"] == "token")
    )
