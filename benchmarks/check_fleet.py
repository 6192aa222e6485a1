"""Members and a fleet of nodes, played by one process: `python -m benchmarks.check_fleet NODES TENSORS KIND`.

Roots are made before the first question, so that the checker is measured and not the fleet. KIND: `equal` for nodes that all hold what was
published, `different` for nodes of which each holds something else in a tenth of its tensors. It prints its URL and ends with its standard
input. There are as many deployments as the nodes need, with up to 1,000 nodes on each side.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from consistency import vector
from raftmeta.core import manifest as manifests
from raftmeta.core.manifest import FORMAT, FileEntry, Manifest, TensorEntry

SIDE = 1_000  # nodes of one side, as the state limits it
SIZE = 8  # bytes of a tensor: entries are made up, nobody holds the bytes


def _hex(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Fleet:
    def __init__(self, nodes: int, tensors: int, kind: str) -> None:
        self.url = ""
        self.names = [f"node-{number:05d}" for number in range(nodes)]
        self.kind = kind
        self.entries = {f"model.layers.{number:05d}.mlp.experts.weight": _hex(f"entry {number}") for number in range(tensors)}
        self.manifest = self._manifest()
        summary = manifests.summarize(self.manifest, manifests.pack(self.manifest))
        self.version = {"model": "moe", "label": "v1", "number": 1, **msgspec.to_builtins(msgspec.structs.asdict(summary))}
        root = self.version["vector_root"]
        self.roots = {name: root if kind == "equal" else vector.root(self.entries_of(name)) for name in self.names}

    def _manifest(self) -> Manifest:
        tensors = [
            TensorEntry(name, "U8", (SIZE,), "w.safetensors", at * SIZE, (at + 1) * SIZE, _hex(name), entry)
            for at, (name, entry) in enumerate(sorted(self.entries.items()))
        ]
        files = (FileEntry("config.json", 2, "1" * 64, "config"), FileEntry("w.safetensors", len(tensors) * SIZE, "2" * 64, "weights"))
        return Manifest(FORMAT, "fake", files, tuple(tensors), (), vector.root(self.entries), ())

    def entries_of(self, node: str) -> dict[str, str]:
        if self.kind == "equal":
            return self.entries
        return {name: _hex(node + name) if at % 10 == 0 else entry for at, (name, entry) in enumerate(self.entries.items())}

    def deployments(self) -> list[dict[str, Any]]:
        made = []
        for at in range(0, len(self.names), 2 * SIDE):
            part = self.names[at : at + 2 * SIDE]
            half = (len(part) + 1) // 2
            made.append(
                {
                    "name": f"moe-{at // (2 * SIDE):03d}",
                    "model": "moe",
                    "primary": {"zone": "a", "nodes": part[:half]},
                    "standby": {"zone": "b", "nodes": part[half:]} if part[half:] else None,
                    "version": "v1",
                    "previous": "",
                    "rollout_id": "r1",
                    "order_revision": 7,
                    "activated_revision": 8,
                }
            )
        return made

    def vector(self, node: str) -> dict[str, Any]:
        return {
            "model": "moe",
            "version": "v1",
            "checksum": self.version["checksum"],
            "slot": 0,
            "epoch": 1,
            "vector_root": self.roots[node],
            "vector_from": "memory",
            "config_digest": self.version["config_digest"],
            "computed_at_ms": 1,
            "age_ms": 1,
            "lag_ms": 10.0,
            "switching": False,
        }

    def answer(self, method: str, target: str, sent: bytes) -> Any:
        parts = urlsplit(target)
        words = parts.path.strip("/").split("/")
        if words[0] == "v1":
            return self._of_members(method, parts.path, sent)
        node, query = words[0], parse_qs(parts.query)
        own = {"node": node, "boot_id": "boot", "active_models": 1}
        if "deployments" in query:
            return {**own, "vectors": dict.fromkeys(query["deployments"][0].split(","), self.vector(node)), "faults": {}}
        if "blocks" in query:
            return {"tensor": query["blocks"][0], "blocks": "AAAAAAAAAAAAAAAAAAAAAA=="}
        return {**own, "deployment": words[-1], **self.vector(node), "entries": self.entries_of(node)}

    def _of_members(self, method: str, path: str, sent: bytes) -> Any:
        if method == "POST":
            return {"items": [{"revision": 9} for _ in json.loads(sent)["items"]]}
        if path == "/v1/deployments":
            return {"items": self.deployments(), "next": None}
        if path == "/v1/nodes":
            return {"items": [{"node": name, "url": f"{self.url}/{name}"} for name in self.names], "next": None}
        if path.endswith("/manifest"):
            return msgspec.to_builtins(self.manifest)
        assert path == "/v1/models/moe/versions/v1", path
        return self.version


async def serve(fleet: Fleet) -> None:
    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                method, target, _ = lines[0].split(" ")
                length = next((int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length:")), 0)
                sent = await reader.readexactly(length)
                body = json.dumps(fleet.answer(method, target, sent)).encode()
                extra = "content-type: application/json\r\nx-raftmeta-revision: 9\r\nx-raftmeta-generation: 1\r\n"
                writer.write(f"HTTP/1.1 200 OK\r\n{extra}content-length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0, backlog=1024)
    fleet.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    print(fleet.url, flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(serve(Fleet(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
