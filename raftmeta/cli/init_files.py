"""The texts that `init` writes, and the folder that it writes them into.

TOML is written from values with one quoting rule, and the tests read every file back through the configuration that will read it.
Everything is 0600 unless it is public; each file is synced, and the caller renames the whole folder at the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raftmeta.durable import OsDisk
from raftmeta.security.roles import Principal
from raftmeta.security.tokens import token_digest

if TYPE_CHECKING:
    from raftmeta.cli.init import ClusterPlan, InitOptions, PlannedAgent, PlannedMember

Value = str | int | bool | Sequence[str]


class Folder:
    """A directory that is being filled; 0700."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path) -> Folder:
        OsDisk().make_directory(path)
        return cls(path)

    def sub(self, name: str) -> Folder:
        return Folder.create(self.path / name)

    def write(self, name: str, data: bytes, *, public: bool = False) -> None:
        """A new file, synced. Raises OSError when it exists."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(self.path / name, flags, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o644 if public else 0o600)
            os.fsync(file.fileno())
        OsDisk().sync_directory(self.path)


def server_toml(member: PlannedMember, plan: ClusterPlan) -> bytes:
    spec = member.spec
    sections: list[tuple[str, dict[str, Value]]] = [
        (
            "",
            {
                "member_id": spec.id,
                "zone": spec.zone,
                "cluster_id": plan.cluster_id,
                "data_dir": "data",
                "principals_file": "principals.toml",
            },
        ),
        ("[api]", {"listen": member.api_listen, "url": spec.api_url, "certificate": "member.pem", "key": "member.key"}),
        (
            "[peer]",
            {
                "listen": member.peer_listen,
                "advertise": spec.peer_address,
                "certificate": "member.pem",
                "key": "member.key",
                "authority": "ca.pem",
            },
        ),
    ]
    for other in plan.members:
        row: dict[str, Value] = {
            "id": other.spec.id,
            "zone": other.spec.zone,
            "peer_address": other.spec.peer_address,
            "api_url": other.spec.api_url,
        }
        sections.append(("[[members]]", row))
    return _toml(f"Member {spec.id} of cluster {plan.cluster_id}. Paths start at this file's folder.", sections)


def agent_toml(agent: PlannedAgent, urls: Sequence[str], options: InitOptions) -> bytes:
    """Paths of the node's own files start at the file's folder, so that the folder can be copied to the node."""
    values: dict[str, Value] = {
        "node": agent.node,
        "zone": agent.zone,
        "member_urls": urls,
        "ca_file": "ca.pem",
        "token_file": "agent.token",
        "listen": agent.listen,
        "tls_cert": "node.pem",
        "tls_key": "node.key",
        "principals_file": "principals.toml",
        "store_dir": "store",
        "arena_dir": str(options.arena_dir.absolute()),
    }
    port = agent.listen.rpartition(":")[2]
    values["url"] = f"https://{agent.host if ':' not in agent.host else f'[{agent.host}]'}:{port}"
    if options.artifact_roots:
        values["artifact_roots"] = [str(root.absolute()) for root in options.artifact_roots]
    return _toml(f"Agent of node {agent.node}. Paths start at this file's folder.", [("", values)])


def client_toml(urls: Sequence[str], token_file: str) -> bytes:
    return _toml(
        "For the raftmeta command line: --config FILE or RAFTMETA_CLIENT_CONFIG. Paths start at this file's folder.",
        [("", {"urls": urls, "ca_file": "ca.pem", "token_file": token_file})],
    )


def principals_toml(tokens: Mapping[Principal, str]) -> bytes:
    rows: list[tuple[str, dict[str, Value]]] = [
        ("[[principal]]", {"name": principal.name, "role": principal.role.value, "token_sha256": token_digest(token)})
        for principal, token in tokens.items()
    ]
    return _toml("Who may call, with the SHA-256 of each token. Read again when it changes.", rows)


def _toml(comment: str, sections: Iterable[tuple[str, Mapping[str, Value]]]) -> bytes:
    lines = [f"# {comment}"]
    for head, values in sections:
        lines.append("")
        if head:
            lines.append(head)
        lines += [f"{key} = {_quoted(value)}" for key, value in values.items()]
    return ("\n".join(lines) + "\n").encode("utf-8")


def _quoted(value: Value) -> str:
    """JSON strings, numbers, booleans and lists of strings are TOML too."""
    plain = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
    return json.dumps(plain, ensure_ascii=False).replace("\x7f", "\\u007f")
