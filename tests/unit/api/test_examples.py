"""Every example of the document, sent as it stands to an API that holds what it names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from api import app
from api.schemas import examples
from raftmeta.core.manifest import Manifest, pack, summarize
from raftmeta.core.rollout import decide
from tests.unit.api.harness import JSON, Api, Exchange, api, run

PUBLISHED, READY, RUNNING, SWITCHED = range(4)  # how far the story has gone
BEGINS_AT = {
    "publish": PUBLISHED,
    "publish_batch": PUBLISHED,
    "declare_deployment": PUBLISHED,
    "delete_version": READY,
    "activate": READY,
    "rollback": SWITCHED,
    "fail_over": READY,
}  # everything else while the rollout runs
SHOWS = {  # what other examples recorded
    "list_nodes": ("heartbeat",),
    "get_consistency": ("record_verdict",),
    "get_evidence": ("heartbeat", "record_evidence"),
}
OLD = "1.3.2"


def calls() -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """(operation, method, path with its examples, the operation as the document shows it)"""
    for template, item in app.document()["paths"].items():
        for method, shown in item.items():
            named = {one["name"]: one["example"] for one in shown["parameters"] if one["in"] == "path"}
            yield shown["operationId"], method.upper(), template.format(**named), shown


CALLS = {name: (method, path, shown) for name, method, path, shown in calls()}


class Story:
    """Tells the story of the examples to one API: 1.3.2 serves on both sides, then comes 1.4.0."""

    def __init__(self, made: Api) -> None:
        self._api = made

    async def tell(self, until: int) -> None:
        older = json.loads(json.dumps(examples.MANIFEST))
        older["tensors"][0]["sha256"] = "1" * 64
        await self._send("PUT", f"/v1/models/{examples.PATH['model']}/versions/{OLD}", {"manifest": older})
        await self._send("PUT", CALLS["declare_deployment"][1], examples.DEPLOYMENT_BODY)
        started = await self._activate(OLD)
        await self._attest(started["rollout_id"], "prepared", "ready", "active")
        if until >= READY:
            await self._send("PUT", CALLS["publish"][1], {"manifest": examples.MANIFEST})
        if until >= RUNNING:
            started = await self._activate(examples.PATH["label"], **{"idempotency-key": examples.ROLLOUT_KEY})
            assert started["rollout_id"] == examples.ROLLOUT_ID
            await self._attest(examples.ROLLOUT_ID, "prepared")
        if until >= SWITCHED:
            await self._attest(examples.ROLLOUT_ID, "ready", "active")

    async def prove_standby(self) -> None:
        """Its nodes are heard and say that they serve what was decided."""
        version = await self._send("GET", f"/v1/models/{examples.PATH['model']}/versions/{OLD}")
        for node in examples.DEPLOYMENT_BODY["standby"]["nodes"]:  # type: ignore[index]
            await self._send("POST", f"/v1/nodes/{node}/heartbeat", {**examples.HEARTBEAT_BODY, "node": node})
            said = {**examples.EVIDENCE_BODY, "version": OLD, "checksum": version["checksum"], "vector_root": version["vector_root"]}
            await self._send("POST", f"/v1/nodes/{node}/evidence", said)

    async def _activate(self, label: str, **headers: str) -> dict[str, Any]:
        return await self._send("POST", CALLS["activate"][1], {"version": label}, **headers)

    async def _attest(self, rollout_id: str, *stages: str) -> None:
        rollout = await self._send("GET", f"/v1/rollouts/{rollout_id}")
        for stage in stages:
            for side in ("primary", "standby"):
                for node in examples.DEPLOYMENT_BODY[side]["nodes"]:  # type: ignore[index]
                    stated = {"rollout_id": rollout_id, "side": side, "stage": stage, "boot_id": examples.ATTEST_BODY["boot_id"]}
                    stated |= {"checksum": rollout["checksum"], "vector_root": rollout["vector_root"]}
                    await self._send("POST", f"/v1/nodes/{node}/attestations", stated)
            self._advance()

    def _advance(self) -> None:
        """What the leader's controller does."""
        member = self._api.member
        for body in decide(member.state, member.log.now_ms, ()):
            revision = member.state.revision
            member.log.propose(body, f"{member.log.now_ms:013d}-controller-{revision}", "system:controller", 1).result()

    async def _send(self, method: str, path: str, body: Any = None, **headers: str) -> dict[str, Any]:
        response = await self._api.client.request(method, path, json=body, headers=headers)
        assert response.is_success, (method, path, response.text)
        answer: dict[str, Any] = response.json()
        return answer


def layout(value: Any) -> Any:
    """The names of all fields, without the values; of a list its first item."""
    if isinstance(value, dict):
        return {name: layout(item) for name, item in value.items()}
    if isinstance(value, list):
        return [layout(item) for item in value[:1]]
    return None


@pytest.mark.parametrize("name", sorted(set(CALLS) - {"watch"}))
def test_an_example_sent_as_it_stands_succeeds_and_is_answered_like_the_example_of_its_answer(name: str) -> None:
    method, path, shown = CALLS[name]

    async def work() -> None:
        async with api() as made:
            if path.startswith("/v1/"):
                story = Story(made)
                await story.tell(BEGINS_AT.get(name, RUNNING))
                if name == "fail_over":
                    await story.prove_standby()
            for other in SHOWS.get(name, ()):
                sent = CALLS[other]
                await made.client.request(sent[0], sent[1], json=example_of(sent[2]))
            body = example_of(shown)
            content = None if body is None else json.dumps(body)
            response = await made.client.request(method, path, content=content, headers=JSON if content else {})
            assert 200 <= response.status_code < 300, response.text
            (answer,) = shown["responses"][str(response.status_code)]["content"].values()
            if isinstance(answer["example"], dict):
                assert layout(response.json()) == layout(answer["example"])

    run(work())


def example_of(shown: dict[str, Any]) -> Any:
    return shown["requestBody"]["content"]["application/json"]["example"] if "requestBody" in shown else None


def test_the_watch_of_the_document_opens() -> None:
    async def work() -> None:
        async with api() as made:
            await Story(made).tell(READY)
            async with Exchange(made.application, CALLS["watch"][1]) as exchange:
                await exchange.until(lambda seen: seen.status == 200 and bool(seen.messages))

    run(work())


def test_every_operation_with_a_body_is_among_the_examples_that_are_sent() -> None:
    assert sum(example_of(shown) is not None for _, _, shown in CALLS.values()) == 13


def test_the_digests_of_the_examples_are_those_of_their_manifest() -> None:
    manifest = msgspec.convert(examples.MANIFEST, Manifest)
    summary = msgspec.structs.asdict(summarize(manifest, pack(manifest)))
    del summary["manifest_digest"]  # of compressed bytes, which are the library's
    assert {name: examples.VERSION[name] for name in summary} == summary
