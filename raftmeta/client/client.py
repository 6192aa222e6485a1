"""The typed face of the REST API: one method per call, over any member.

Replies are JSON objects (`Reply`, a dict) with the fields of `raftmeta.core.types` and the revision they belong to. Reads are linearizable
unless asked otherwise. Errors are RaftmetaError with the server's code; when no member answers in time the code is of class unavailable and
says, for a mutation, whether it may still have been applied.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import msgspec

from raftmeta import strict_json
from raftmeta.client.transport import Options, Request, Transport
from raftmeta.client.values import FIRST_PAGE, LINEARIZABLE, Bookmark, Change, Page, Read, Reply
from raftmeta.client.watch import Watch, WatchOptions
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import Manifest

MAX_PAGES = 10_000  # of one list read to its end

ManifestLike = Manifest | Mapping[str, Any]


class Client:
    """Use as an async context manager; safe for concurrent calls in one event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | None = None,
        ca_file: Path | None = None,
        timeout_s: float = 30.0,
        options: Options | None = None,
    ) -> None:
        """`options` sets everything at once, and then stands in place of the other keywords."""
        self._transport = Transport(urls, options or Options(token=token, ca_file=ca_file, timeout_s=timeout_s))

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        await self._transport.close()

    @property
    def urls(self) -> tuple[str, ...]:
        return self._transport.urls

    @property
    def current_url(self) -> str:
        """The member that answered last, asked first by the next call."""
        return self._transport.current_url

    # models and versions

    async def publish(self, model: str, label: str, manifest: ManifestLike, *, key: str = "") -> Reply:
        """The version; status 201 when it is new, 200 when the same bytes were there."""
        return await self._put(_path("models", model, "versions", label), {"manifest": _builtin(manifest)}, key)

    async def publish_batch(self, model: str, items: Sequence[tuple[str, ManifestLike]], *, key: str = "") -> Reply:
        """All or none of at most 1,000 (label, manifest)."""
        body = {"items": [{"label": label, "manifest": _builtin(manifest)} for label, manifest in items]}
        return await self._post(_path("models", model, "versions:batch"), body, key)

    async def delete_version(self, model: str, label: str, *, key: str = "") -> Reply:
        return await self._transport.call(Request("DELETE", _path("models", model, "versions", label), key=key))

    async def list_models(self, page: Page = FIRST_PAGE, read: Read = LINEARIZABLE) -> Reply:
        return await self._get(_path("models"), read, page.params())

    async def get_model(self, model: str, read: Read = LINEARIZABLE) -> Reply:
        return await self._get(_path("models", model), read)

    async def list_versions(self, model: str, page: Page = FIRST_PAGE, read: Read = LINEARIZABLE) -> Reply:
        return await self._get(_path("models", model, "versions"), read, page.params())

    async def get_version(self, model: str, label: str, read: Read = LINEARIZABLE) -> Reply:
        return await self._get(_path("models", model, "versions", label), read)

    async def get_manifest(self, model: str, label: str, read: Read = LINEARIZABLE) -> Reply:
        return await self._get(_path("models", model, "versions", label, "manifest"), read)

    # deployments and rollouts

    async def declare_deployment(self, name: str, body: Mapping[str, Any], *, key: str = "") -> Reply:
        """`body`: model, primary {zone, nodes}, standby {zone, nodes} or null, policy (optional)."""
        return await self._put(_path("deployments", name), body, key)

    async def list_deployments(self, page: Page = FIRST_PAGE, read: Read = LINEARIZABLE) -> Reply:
        return await self._get(_path("deployments"), read, page.params())

    async def get_deployment(self, name: str, read: Read = LINEARIZABLE) -> Reply:
        return await self._get(_path("deployments", name), read)

    async def activate(self, deployment: str, version: str, expected_version: str | None = None, *, key: str = "") -> Reply:
        """Start a rollout: `rollout_id`. `expected_version` "" means that nothing serves yet, None whatever serves."""
        body = {"version": version} | _expected(expected_version)
        return await self._post(_path("deployments", deployment, "activate"), body, key)

    async def rollback(self, deployment: str, expected_version: str | None = None, *, key: str = "") -> Reply:
        return await self._post(_path("deployments", deployment, "rollback"), _expected(expected_version), key)

    async def preview_failover(
        self, deployment: str, to: str = "", max_verdict_age_ms: int | None = None, read: Read = LINEARIZABLE
    ) -> Reply:
        """What speaks against it now: `allowed`, `allowed_with_force`, `reasons`. `to` "": the side that does not serve."""
        params = ({"to": to} if to else {}) | ({} if max_verdict_age_ms is None else {"max_verdict_age_ms": str(max_verdict_age_ms)})
        return await self._get(_path("deployments", deployment, "failover"), read, params)

    async def fail_over(self, deployment: str, body: Mapping[str, Any], *, key: str = "") -> Reply:
        """`body`: to, expected_serving_side, max_verdict_age_ms, force; all but the first optional. `failover_refused` has `reasons`."""
        return await self._post(_path("deployments", deployment, "failover"), body, key)

    async def get_rollout(self, rollout_id: str, read: Read = LINEARIZABLE, timeout_s: float | None = None) -> Reply:
        """`timeout_s` bounds this call: who follows a rollout waits longer for members that are away than others do."""
        return await self._get(_path("rollouts", rollout_id), read, timeout_s=timeout_s)

    async def abort_rollout(self, rollout_id: str, *, key: str = "") -> Reply:
        return await self._post(_path("rollouts", rollout_id, "abort"), {}, key)

    # agents, fleet, checks

    async def heartbeat(self, node: str, status: Mapping[str, Any], timeout_s: float | None = None) -> Reply:
        """Not replicated. `timeout_s` bounds this call: a late heartbeat is worth nothing."""
        return await self._post(_path("nodes", node, "heartbeat"), status, "", timeout_s)

    async def attest(self, node: str, attestation: Mapping[str, Any], *, key: str = "") -> Reply:
        return await self._post(_path("nodes", node, "attestations"), attestation, key)

    async def record_evidence(self, node: str, evidence: Mapping[str, Any], *, key: str = "") -> Reply:
        """Which bytes the node serves with for a deployment now."""
        return await self._post(_path("nodes", node, "evidence"), evidence, key)

    async def evidence(self, deployment: str, read: Read = LINEARIZABLE) -> Reply:
        """Which bytes serve where: `nodes`, each with its standing and what it said last."""
        return await self._get(_path("deployments", deployment, "evidence"), read)

    async def nodes(self, read: Read = LINEARIZABLE) -> Reply:
        return await self._get(_path("nodes"), read)

    async def cluster(self, read: Read = LINEARIZABLE) -> Reply:
        return await self._get(_path("cluster"), read)

    async def raise_feature_level(self, level: int, *, key: str = "") -> Reply:
        """To the next one only, and never back. `feature_level_unsupported` names the members that cannot run it."""
        return await self._post(_path("cluster", "feature-level"), {"level": level}, key)

    async def consistency(self, read: Read = LINEARIZABLE) -> Reply:
        """The last verdict of each deployment."""
        return await self._get(_path("consistency"), read)

    async def verdicts(self, since: int, deployment: str = "", page: Page = FIRST_PAGE, read: Read = LINEARIZABLE) -> Reply:
        """Those recorded after a revision, in order; `dropped_revision` tells when older ones among them are not kept any more."""
        params = {"since": str(since)} | ({"deployment": deployment} if deployment else {})
        return await self._get(_path("consistency"), read, params | dict(page.params()))

    async def record_verdict(
        self, deployment: str, verdict: str, report: Mapping[str, Any], *, basis: Mapping[str, Any] | None = None, key: str = ""
    ) -> Reply:
        """`basis`: what it was computed for, where the report does not have it. `verdict_outdated` once the deployment moved on from it."""
        body: dict[str, Any] = {"deployment": deployment, "verdict": verdict, "report": report}
        if basis is not None:
            body["basis"] = basis
        return await self._post(_path("consistency"), body, key)

    async def record_verdicts(self, items: Sequence[Mapping[str, Any]], *, key: str = "") -> Reply:
        """At most 1,000 items {deployment, verdict, report}, each judged for itself: `items` with revision, and `code` and `detail` of a
        refused one, in the same order."""
        return await self._post(_path("consistency:batch"), {"items": list(items)}, key)

    def watch(
        self, from_revision: int, resources: Sequence[str] = (), options: WatchOptions | None = None
    ) -> AsyncGenerator[Change | Bookmark, None]:
        """Events with revision > from_revision, resumed over lost connections. Raises RaftmetaError `compacted`: list again.

        Who stops before its end closes it: `async with aclosing(client.watch(...)) as changes`.
        """
        return Watch(self._transport, from_revision, options or WatchOptions(resources=resources)).run()

    async def _get(self, path: str, read: Read, params: Mapping[str, str] | None = None, timeout_s: float | None = None) -> Reply:
        return await self._transport.call(Request("GET", path, {**read.params(), **(params or {})}), timeout_s)

    async def _put(self, path: str, body: object, key: str) -> Reply:
        return await self._transport.call(Request("PUT", path, body=strict_json.dumps(body), key=key))

    async def _post(self, path: str, body: object, key: str, timeout_s: float | None = None) -> Reply:
        return await self._transport.call(Request("POST", path, body=strict_json.dumps(body), key=key), timeout_s)


async def all_items(fetch: Callable[[Page], Awaitable[Reply]]) -> AsyncIterator[dict[str, Any]]:
    """Every item of a list, page after page: `all_items(client.list_models)`."""
    page = FIRST_PAGE
    for _ in range(MAX_PAGES):
        reply = await fetch(page)
        for item in reply["items"]:
            yield item
        cursor = reply.get("next")
        if not cursor:
            return
        if cursor == page.after:
            raise RaftmetaError("internal", f"the list goes in circles at {cursor!r}")
        page = Page(page.limit, cursor)
    raise RaftmetaError("body_too_large", f"the list has more than {MAX_PAGES} pages")


def _path(*segments: str) -> str:
    """Each segment is quoted, so no name can leave its place in the path."""
    for segment in segments:
        if segment in ("", ".", ".."):
            raise RaftmetaError("bad_name", f"{segment!r} is no name")
    return "/v1/" + "/".join(quote(segment, safe=":") for segment in segments)


def _expected(version: str | None) -> dict[str, str]:
    return {} if version is None else {"expected_version": version}


def _builtin(manifest: ManifestLike) -> Any:
    return msgspec.to_builtins(manifest) if isinstance(manifest, Manifest) else manifest
