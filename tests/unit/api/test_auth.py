"""Who may call: tokens, anonymous callers of a development member, and judgement of the expanded operation."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from api.routes import OPERATIONS
from api.service import ApiLimits
from raftmeta.security.roles import ACTIONS
from raftmeta.watch import WatchLimits
from tests.support.fake_log import FakeMember
from tests.unit.api.harness import BASE, DEPLOYMENT, JSON, MODEL, PUBLISH, Exchange, api, basis, manifest, run


def with_tokens() -> FakeMember:
    member = FakeMember()
    member.authorizer.tokens = {"secret-1": "ci", "secret-2": "viewer"}
    return member


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_a_token_names_the_principal_of_what_it_publishes() -> None:
    async def work() -> None:
        async with api(with_tokens()) as made:
            reply = await made.publish(**bearer("secret-1"))
            assert (reply.status_code, reply.json()["principal"]) == (201, "ci")
            assert (await made.publish("2.0.0", 1, authorization="bearer  secret-2")).json()["principal"] == "viewer"

    run(work())


def test_a_recorded_verdict_names_who_recorded_it_and_when() -> None:
    async def work() -> None:
        async with api(with_tokens()) as made:
            await made.publish(**bearer("secret-1"))
            await made.client.put("/v1/deployments/search", json=DEPLOYMENT, headers=bearer("secret-1"))
            for token, verdict in (("secret-1", "diverged"), ("secret-2", "incomplete")):
                made.member.log.now_ms += 1_000
                sent = {"deployment": "search", "verdict": verdict, "report": {}, "basis": basis(made.member)}
                assert (await made.client.post("/v1/consistency", json=sent, headers=bearer(token))).status_code == 200
                (shown,) = (await made.client.get("/v1/consistency", headers=bearer("secret-2"))).json()["items"]
                recorded = (shown["verdict"], shown["principal"], shown["recorded_ms"])
                assert recorded == (verdict, made.member.authorizer.tokens[token], made.member.log.now_ms)

    run(work())


@pytest.mark.parametrize("given", [None, "Bearer wrong", "Bearer", "Bearer ", "Basic c2VjcmV0LTE=", "secret-1", "Bearer " + "x" * 5_000])
def test_without_a_known_token_nothing_is_read_or_written(given: str | None) -> None:
    async def work() -> None:
        async with api(with_tokens()) as made:
            headers = {} if given is None else {"authorization": given}
            for method, path in (("PUT", PUBLISH), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/v1/watch")):
                reply = await made.client.request(
                    method, path, headers={**headers, **JSON}, content=b"not json" if method == "PUT" else None
                )
                assert (reply.status_code, reply.json()["code"]) == (401, "unauthenticated")
                assert reply.headers["www-authenticate"] == "Bearer"
            assert made.member.log.proposed == []
            for path in ("/livez", "/readyz", "/openapi.json"):
                assert (await made.client.get(path)).status_code == 200

    run(work())


def test_what_the_authorizer_forbids_is_refused_before_the_body_is_looked_at() -> None:
    async def work() -> None:
        member = with_tokens()
        member.authorizer.denied = {("viewer", "publish", "*"), ("viewer", "delete", "models/encoder/versions/1.0.0")}
        async with api(member) as made:
            await made.publish(**bearer("secret-1"))
            reply = await made.client.put(PUBLISH, headers={**bearer("secret-2"), **JSON}, content=b"not json")
            assert (reply.status_code, reply.json()["code"]) == (403, "forbidden")
            assert (await made.client.delete(PUBLISH, headers=bearer("secret-2"))).status_code == 403
            assert (await made.client.get(PUBLISH, headers=bearer("secret-2"))).status_code == 200
            assert made.member.state.revision == 1

    run(work())


def test_a_batch_is_judged_item_by_item() -> None:
    async def work() -> None:
        member = with_tokens()
        member.authorizer.denied = {("ci", "publish", "models/encoder/versions/secret")}
        async with api(member) as made:
            items = [{"label": label, "manifest": manifest()} for label in ("open", "secret")]
            reply = await made.client.post(f"{MODEL}/versions:batch", json={"items": items}, headers=bearer("secret-1"))
            assert reply.json()["code"] == "forbidden"
            assert made.member.log.proposed == []

    run(work())


def test_a_watch_shows_only_what_the_caller_may_read_and_its_bookmarks_go_on() -> None:
    async def work() -> None:
        member = with_tokens()
        member.authorizer.denied = {("viewer", "read", "models/encoder/versions/2.0.0")}
        async with api(member) as made:
            for number, label in enumerate(("1.0.0", "2.0.0", "3.0.0")):
                await made.publish(label, number, **bearer("secret-1"))
            headers = ((b"authorization", b"Bearer secret-2"),)
            async with Exchange(made.application, "/v1/watch", "from_revision=0&resource=versions", headers) as watch:
                await watch.until(lambda seen: len(seen.messages) == 3)
                assert [(event, at) for event, at, _ in watch.messages] == [("change", 1), ("change", 3), ("bookmark", 3)]

    run(work())


def test_a_watch_ends_when_its_token_is_withdrawn() -> None:
    async def work() -> None:
        async with api(with_tokens(), ApiLimits(bookmark_s=0.02)) as made:
            async with Exchange(made.application, "/v1/watch", headers=((b"authorization", b"Bearer secret-1"),)) as watch:
                await watch.until(lambda seen: len(seen.messages) == 2)
                del made.member.authorizer.tokens["secret-1"]
                await watch.until(lambda seen: seen.complete)
            assert made.member.watch.watchers == 0

    run(work())


WATCH_OF_1 = ("/v1/watch", "from_revision=0&resource=versions", ((b"authorization", b"Bearer secret-1"),))


def test_a_watch_judges_events_by_what_its_caller_is_now() -> None:
    async def work() -> None:
        async with api(with_tokens(), ApiLimits(bookmark_s=0.02)) as made, Exchange(made.application, *WATCH_OF_1) as watch:
            authorizer = made.member.authorizer
            await made.publish("1.0.0", 1, **bearer("secret-2"))
            await watch.until(lambda seen: ("change", 1) in [message[:2] for message in seen.messages])
            authorizer.denied = {("less", "read", "*")}
            authorizer.tokens["secret-1"] = "less"
            seen_until_now = len(watch.messages)
            await watch.until(lambda seen: len(seen.messages) > seen_until_now + 1)  # the second bookmark after it
            await made.publish("2.0.0", 2, **bearer("secret-2"))
            await watch.until(lambda seen: ("bookmark", 2, {"revision": 2}) in seen.messages)
            assert ("change", 2) not in [message[:2] for message in watch.messages]

    run(work())


def test_a_watch_ends_when_its_caller_may_watch_no_more() -> None:
    async def work() -> None:
        async with api(with_tokens(), ApiLimits(bookmark_s=0.02)) as made, Exchange(made.application, *WATCH_OF_1) as watch:
            await watch.until(lambda seen: len(seen.messages) == 1)
            made.member.authorizer.denied = {("ci", "watch", "*")}
            await watch.until(lambda seen: seen.complete)

    run(work())


def test_a_watch_whose_token_is_withdrawn_ends_also_while_there_is_always_something_to_send() -> None:
    """Its client reads slowly: whenever it took something, more is there."""

    async def work() -> None:
        async with (
            api(FakeMember(WatchLimits(take_changes=1)), ApiLimits(bookmark_s=0.02)) as made,
            Exchange(made.application, *WATCH_OF_1) as watch,
        ):
            made.member.authorizer.tokens = with_tokens().authorizer.tokens
            await watch.until(lambda seen: len(seen.messages) == 1)
            watch.blocked = asyncio.Event()
            for number in range(9):
                await made.publish(f"1.{number}", number, **bearer("secret-2"))
            await watch.waits.wait()
            await asyncio.sleep(0.03)  # longer than between two looks at who the caller is
            del made.member.authorizer.tokens["secret-1"]
            watch.blocked.set()
            await watch.until(lambda seen: seen.complete)
            assert len(watch.messages) < 5, "what it had taken already, and no more"

    run(work())


@pytest.mark.parametrize(
    ("client", "headers"),
    [
        ("192.0.2.7", {}),
        ("127.0.0.1", {"host": "evil.example"}),
        ("127.0.0.1", {"host": "127.0.0.1.evil.example:7400"}),
        ("127.0.0.1", {"host": ""}),
        ("127.0.0.1", {"origin": "http://evil.example"}),
        ("127.0.0.1", {"origin": "http://127.0.0.1:9999"}),
        ("127.0.0.1", {"origin": "null"}),
    ],
)
def test_a_caller_without_a_token_comes_from_this_machine_and_from_no_foreign_page(client: str, headers: dict[str, str]) -> None:
    async def work() -> None:
        async with api(client=client) as made:
            reply = await made.client.put(PUBLISH, json={"manifest": manifest()}, headers=headers)
            assert reply.status_code in (401, 403), reply.text
            assert made.member.log.proposed == []

    run(work())


@pytest.mark.parametrize("headers", [{"host": "localhost:7400"}, {"host": "[::1]:7400"}, {"origin": BASE}])
def test_a_caller_on_this_machine_needs_no_token(headers: dict[str, str]) -> None:
    async def work() -> None:
        async with api() as made:
            reply: httpx.Response = await made.client.get("/v1/models", headers=headers)
            assert reply.status_code == 200

    run(work())


def test_every_action_of_an_operation_has_a_row_in_the_table_of_roles() -> None:
    assert {operation.action for operation in OPERATIONS if operation.action} <= set(ACTIONS)
    assert {operation.id for operation in OPERATIONS if not operation.action} == {"livez", "readyz"}
