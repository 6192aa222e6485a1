"""The peer of `commit` and `rest`: three etcd 3.4 members on this machine, loaded through their JSON gateway by wrk.

Values have 300 bytes, keys are distinct. Needs Debian's packages etcd-server and wrk; without them the benchmark says so and ends.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

VALUE_BYTES = 300
START_S = 30.0

_PUT_LUA = """
local value = "{value}"
local n = 0
local id = 0
function setup(thread) thread:set("id", math.random(1, 1000000000)) end
function request()
  n = n + 1
  local key = string.format("%012d-%010d", id, n)
  return wrk.format("POST", "/v3/kv/put", {{["Content-Type"]="application/json"}},
    '{{"key":"' .. base64(key) .. '","value":"' .. value .. '"}}')
end
local abc = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
function base64(data)
  local out = {{}}
  for i = 1, #data, 3 do
    local a, b, c = data:byte(i, i + 2)
    local word = a * 65536 + (b or 0) * 256 + (c or 0)
    for s = 18, 0, -6 do
      local six = math.floor(word / 2 ^ s) % 64
      out[#out + 1] = abc:sub(six + 1, six + 1)
    end
    if not c then out[#out] = "=" end
    if not b then out[#out - 1] = "=" end
  end
  return table.concat(out)
end
math.randomseed(os.time())
"""

_RANGE_LUA = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{{"key":"{key}"}}'
"""


@dataclass(frozen=True)
class Tls:
    """PEM files that every etcd member uses as server and client certificate."""

    certificate: Path
    key: Path
    authority: Path


def available() -> str:
    """What is missing to run the peer, "" when nothing is."""
    missing = [name for name in ("etcd", "wrk") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not found; on Debian: apt-get install etcd-server wrk" if missing else ""


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


class Member:
    """One etcd process on a directory of its own."""

    def __init__(self, url: str, command: list[str]) -> None:
        self.url = url
        self._command = command
        self.process = self._started()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def restart(self) -> None:
        """The same member once more, after it was killed."""
        self.process.wait(10)
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "ETCDCTL_API": "3"}
        return subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)


@contextlib.contextmanager
def members(tls: Tls | None = None, flags: Sequence[str] = ()) -> Iterator[list[Member]]:
    """Three members, each started with these flags too; without a leader yet."""
    scheme = "https" if tls else "http"
    ports = free_ports(6)
    names = ["e1", "e2", "e3"]
    peers = ",".join(f"{name}={scheme}://127.0.0.1:{ports[2 * number + 1]}" for number, name in enumerate(names))
    with tempfile.TemporaryDirectory(prefix="etcd-") as folder, contextlib.ExitStack() as stack:
        made = []
        for number, name in enumerate(names):
            client, peer = (f"{scheme}://127.0.0.1:{port}" for port in ports[2 * number : 2 * number + 2])
            command = ["etcd", "--name", name, "--data-dir", f"{folder}/{name}", "--listen-client-urls", client]
            command += ["--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
            command += ["--initial-cluster", peers, "--log-level", "error", *flags]
            if tls:
                for prefix in ("", "peer-"):
                    command += [f"--{prefix}cert-file", str(tls.certificate), f"--{prefix}key-file", str(tls.key)]
                command += ["--peer-trusted-ca-file", str(tls.authority), "--peer-client-cert-auth"]
            member = Member(client, command)
            stack.callback(member.end)
            made.append(member)
        yield made


@contextlib.contextmanager
def cluster(tls: Tls | None = None) -> Iterator[list[str]]:
    """Three members; the client URLs, the leader's first."""
    with members(tls) as made:
        yield _leader_first([member.url for member in made], tls)


def writes(url: str, clients: int, seconds: float) -> float:
    """Acknowledged puts per second."""
    value = base64.b64encode(os.urandom(VALUE_BYTES * 3 // 4)).decode()[:VALUE_BYTES]
    return wrk(url, clients, seconds, _PUT_LUA.format(value=base64.b64encode(value.encode()).decode())).rate


def put_body(key: str) -> bytes:
    """The JSON of one put of VALUE_BYTES."""
    value = base64.b64encode(b"x" * VALUE_BYTES).decode()
    return json.dumps({"key": base64.b64encode(key.encode()).decode(), "value": value}).encode()


def reads(url: str, clients: int, seconds: float) -> float:
    """Linearizable reads per second of one key of 300 bytes."""
    key = base64.b64encode(b"read-me").decode()
    post(url + "/v3/kv/put", {"key": key, "value": base64.b64encode(b"x" * VALUE_BYTES).decode()}, None)
    return wrk(url + "/v3/kv/range", clients, seconds, _RANGE_LUA.format(key=key)).rate


@dataclass(frozen=True)
class Load:
    rate: float  # answered requests per second
    failed: int  # answers that are no success, and broken connections
    p50_ms: float


def wrk(url: str, clients: int, seconds: float, script: str) -> Load:
    """One run of wrk with one thread. Raises RuntimeError when most requests fail."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as file:
        file.write(script)
        file.flush()
        command = ["wrk", "-t1", f"-c{clients}", f"-d{seconds:g}s", "--latency", "-s", file.name, url]
        out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + 60).stdout
    rate = float(re.search(r"Requests/sec:\s+([\d.]+)", out)[1])  # type: ignore[index]
    failures = [int(number) for number in re.findall(r"Non-2xx or 3xx responses: (\d+)", out)]
    total = int(re.search(r"(\d+) requests in", out)[1])  # type: ignore[index]
    if failures and failures[0] > total // 100:
        raise RuntimeError(f"{failures[0]} of {total} requests to {url} failed")
    p50 = re.search(r"50%\s+([\d.]+)(us|ms|s)", out)
    scale = {"us": 0.001, "ms": 1.0, "s": 1000.0}
    return Load(rate, sum(failures), float(p50[1]) * scale[p50[2]] if p50 else 0.0)


def _leader_first(urls: list[str], tls: Tls | None) -> list[str]:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, KeyError, ValueError):
            answers = [post(url + "/v3/maintenance/status", {}, tls) for url in urls]
            leaders = {str(answer["leader"]) for answer in answers}
            if len(leaders) == 1 and "0" not in leaders:
                return sorted(urls, key=lambda url: str(answers[urls.index(url)]["header"]["member_id"]) not in leaders)
        time.sleep(0.1)
    raise RuntimeError(f"etcd elected no leader within {START_S:g} s")


def post(url: str, body: dict[str, str], tls: Tls | None) -> dict[str, dict[str, str]]:
    import ssl

    context = None
    if url.startswith("https"):
        context = ssl.create_default_context(cafile=str(tls.authority) if tls else None)
        if tls is None:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=5, context=context) as reply:
        answer: dict[str, dict[str, str]] = json.load(reply)
    return answer
