"""The watch as server-sent events: order, bookmarks, resumption, ends, slow and dead clients."""

from __future__ import annotations

import asyncio
from typing import Any

from api.service import ApiLimits
from raftmeta.client.sse import SseParser
from raftmeta.watch import WatchLimits
from tests.support.fake_log import FakeMember
from tests.unit.api.harness import DEPLOYMENT, MODEL, Exchange, api, basis, run

FAST = ApiLimits(bookmark_s=0.02, comment_s=0.01, revision_wait_s=0.05)
SLOW = ApiLimits(bookmark_s=60, comment_s=60)


def test_a_watch_sends_the_backlog_then_a_bookmark_then_what_comes() -> None:
    async def work() -> None:
        async with api(limits=SLOW) as made:
            first = (await made.publish()).json()
            async with Exchange(made.application, "/v1/watch", "from_revision=0") as watch:
                await watch.until(lambda seen: len(seen.messages) == 2)
                assert watch.headers["content-type"] == "text/event-stream"
                assert watch.headers["cache-control"] == "no-store"
                event, at, data = watch.messages[0]
                assert (event, at, data["revision"]) == ("change", 1, 1)
                by_kind = {one["kind"]: one for one in data["events"]}
                assert by_kind["version"] == {"kind": "version", "key": "encoder/1.0.0", "op": "put", "value": first}
                assert by_kind["model"]["value"]["version_count"] == 1
                assert watch.messages[1] == ("bookmark", 1, {"revision": 1})
                await made.client.delete(f"{MODEL}/versions/1.0.0")
                await watch.until(lambda seen: len(seen.messages) == 3)
                event, at, data = watch.messages[2]
                assert (event, at) == ("change", 2)
                assert {"kind": "version", "key": "encoder/1.0.0", "op": "delete", "value": None} in data["events"]

    run(work())


def test_every_kind_of_record_is_sent_as_it_is_read() -> None:
    async def work() -> None:
        async with api(limits=SLOW) as made:
            await made.prepared()
            started = (await made.client.post("/v1/deployments/search/activate", json={"version": "1.0.0"})).json()
            sent = {"deployment": "search", "verdict": "incomplete", "report": {"a": [1, "b"]}, "basis": basis(made.member)}
            await made.client.post("/v1/consistency", json=sent)
            async with Exchange(made.application, "/v1/watch", "from_revision=0") as watch:
                await watch.until(lambda seen: seen.messages[-1:] != [] and seen.messages[-1][0] == "bookmark")
                last = {(one["kind"], one["key"]): one["value"] for _, _, data in watch.messages for one in data.get("events", ())}
            rollout = (await made.client.get(f"/v1/rollouts/{started['rollout_id']}")).json()
            assert last["rollout", rollout["id"]] == rollout
            assert last["version", "encoder/2.0.0"] == (await made.client.get(f"{MODEL}/versions/2.0.0")).json()
            assert last["model", "encoder"] == (await made.client.get(MODEL)).json()
            assert last["verdict", "search"] == (await made.client.get("/v1/consistency")).json()["items"][0]
            deployment = (await made.client.get("/v1/deployments/search")).json()
            assert last["deployment", "search"].items() <= deployment.items()

    run(work())


def test_a_watch_resumes_after_the_last_revision_that_it_saw() -> None:
    async def work() -> None:
        async with api(limits=SLOW) as made:
            for number in range(4):
                await made.publish(f"1.{number}", number)
            async with Exchange(made.application, "/v1/watch", "from_revision=2&resource=versions") as watch:
                await watch.until(lambda seen: len(seen.messages) == 3)
                assert [(event, at) for event, at, _ in watch.messages] == [("change", 3), ("change", 4), ("bookmark", 4)]

    run(work())


def test_without_a_revision_a_watch_begins_now() -> None:
    async def work() -> None:
        async with api(limits=SLOW) as made:
            await made.publish()
            async with Exchange(made.application, "/v1/watch") as watch:
                await watch.until(lambda seen: len(seen.messages) == 1)
                assert watch.messages == [("bookmark", 1, {"revision": 1})]
                assert watch.headers["x-raftmeta-revision"] == "1"

    run(work())


def test_bookmarks_move_over_what_a_filter_leaves_out_and_over_refused_commands() -> None:
    async def work() -> None:
        async with api(limits=FAST) as made:
            await made.publish()
            async with Exchange(made.application, "/v1/watch", "from_revision=0&resource=rollouts,verdicts") as watch:
                await made.publish(number=1)  # refused: it has a revision and no event
                await watch.until(lambda seen: ("bookmark", 2, {"revision": 2}) in seen.messages)
                assert {event for event, _, _ in watch.messages} == {"bookmark"}
                revisions = [at for _, at, _ in watch.messages]
                assert revisions == sorted(revisions)

    run(work())


class TakesItsTurn(Exchange):
    """A client to which every message takes a turn of the loop, so that a bookmark may be due each time."""

    async def _send(self, message: dict[str, Any]) -> None:
        await super()._send(message)
        await asyncio.sleep(0)


def test_a_bookmark_never_overtakes_an_event_however_little_is_handed_out_at_once() -> None:
    """The backlog is long, most of it is of another kind, and a bookmark is due whenever there is nothing to send."""

    async def work() -> None:
        limits = WatchLimits(take_changes=2)
        async with api(FakeMember(limits), ApiLimits(bookmark_s=0, comment_s=0.01)) as made:
            for number in range(12):
                await made.publish(f"1.{number}", number)
            await made.client.put("/v1/deployments/search", json=DEPLOYMENT)
            for number in range(12, 20):
                await made.publish(f"1.{number}", number)
            await made.client.put("/v1/deployments/other", json=DEPLOYMENT)
            wanted = [13, 22]
            async with TakesItsTurn(made.application, "/v1/watch", "from_revision=0&resource=deployments") as watch:
                await watch.until(lambda seen: ("bookmark", 22, {"revision": 22}) in seen.messages)
                assert [at for kind, at, _ in watch.messages if kind == "change"] == wanted
                marks = [at for kind, at, _ in watch.messages if kind == "bookmark"]
                assert len(set(marks)) > 3 and marks == sorted(marks), "the backlog was handed out in pieces"
                for place, (kind, at, _) in enumerate(watch.messages):
                    sent = [one for before, one, _ in watch.messages[:place] if before == "change"]
                    assert kind == "change" or sent == [revision for revision in wanted if revision <= at]

    run(work())


def test_an_idle_watch_shows_signs_of_life() -> None:
    async def work() -> None:
        async with api(limits=ApiLimits(bookmark_s=60, comment_s=0.01)) as made, Exchange(made.application, "/v1/watch") as watch:
            await watch.until(lambda seen: seen.body.count(b":\n\n") >= 3)

    run(work())


def test_a_watch_from_too_long_ago_is_gone() -> None:
    async def work() -> None:
        async with api(FakeMember(WatchLimits(max_events=4))) as made:
            for number in range(4):
                await made.publish(f"1.{number}", number)
            reply = await made.client.get("/v1/watch?from_revision=1")
            assert (reply.status_code, reply.json()["code"], reply.json()["floor"]) == (410, "compacted", 2)
            assert made.member.watch.watchers == 0

    run(work())


def test_a_watch_that_reads_too_slowly_is_told_so_after_what_it_got_without_a_gap() -> None:
    async def work() -> None:
        async with api(FakeMember(WatchLimits(max_events=4)), SLOW) as made:
            watch = Exchange(made.application, "/v1/watch", "from_revision=0&resource=versions")
            async with watch:
                await watch.until(lambda seen: len(seen.messages) == 1)
                watch.blocked = asyncio.Event()
                for number in range(9):
                    await made.publish(f"1.{number}", number)
                watch.blocked.set()
                await watch.until(lambda seen: seen.complete)
                changes = [at for event, at, _ in watch.messages if event == "change"]
                assert changes == list(range(1, len(changes) + 1)), "a gap"
                assert watch.messages[-1][0] == "compacted"
                assert watch.messages[-1][2]["code"] == "compacted"
            assert made.member.watch.watchers == 0
            assert made.service.stats.compacted_watches == 1

    run(work())


def test_an_installed_snapshot_ends_open_watches_with_compacted() -> None:
    async def work() -> None:
        async with api(limits=SLOW) as made, Exchange(made.application, "/v1/watch") as watch:
            await watch.until(lambda seen: len(seen.messages) == 1)
            made.member.watch.compacted(40)
            await watch.until(lambda seen: seen.complete)
            assert watch.messages[-1][0] == "compacted"

    run(work())


def test_a_member_whose_state_stands_for_nothing_opens_no_watch_and_keeps_none() -> None:
    async def work() -> None:
        async with api(limits=SLOW) as made:
            await made.publish()
            async with Exchange(made.application, "/v1/watch", "from_revision=1") as watch:
                await watch.until(lambda seen: len(seen.messages) == 1)
                made.member.unsound = "a majority has another state"
                made.member.watch.begin_again(1)
                await watch.until(lambda seen: seen.complete)
                assert watch.messages[-1][0] == "compacted", "what it was told may be wrong: it has to list again"
            reply = await made.client.get("/v1/watch?from_revision=1")
            assert (reply.status_code, reply.json()["code"]) == (503, "starting")
            assert made.member.watch.watchers == 0

    run(work())


def test_a_watch_that_waits_for_its_revision_while_its_member_is_contradicted_is_not_opened() -> None:
    async def work() -> None:
        async with api(limits=ApiLimits(revision_wait_s=5)) as made:
            opening = asyncio.create_task(made.client.get("/v1/watch?from_revision=1"))
            await asyncio.sleep(0.02)
            made.member.unsound = "a majority has another state"
            made.member.watch.begin_again(0)
            made.member.watch.publish([], 1)
            reply = await opening
            assert (reply.status_code, reply.json()["code"]) == (503, "revision_not_reached")
            assert made.member.watch.watchers == 0

    run(work())


def test_a_member_that_is_contradicted_while_a_watch_is_opened_keeps_it_not() -> None:
    class Contradicted(FakeMember):
        """A majority contradicts it after the first look at it."""

        looks = 0

        @property
        def unsound(self) -> str:  # type: ignore[override]
            self.looks += 1
            return "a majority has another state" if self.looks > 1 else ""

        @unsound.setter
        def unsound(self, value: str) -> None: ...

    async def work() -> None:
        async with api(Contradicted(), SLOW) as made:
            reply = await made.client.get("/v1/watch")
            assert (reply.status_code, reply.json()["code"]) == (503, "starting")
            assert made.member.watch.watchers == 0

    run(work())


def test_a_watch_from_the_future_waits_a_bounded_time_and_then_asks_for_a_retry() -> None:
    async def work() -> None:
        async with api(limits=FAST) as made:
            reply = await made.client.get("/v1/watch?from_revision=1")
            assert (reply.status_code, reply.json()["code"]) == (503, "revision_not_reached")
            assert reply.headers["retry-after"] == "1"
        async with (
            api(limits=ApiLimits(revision_wait_s=5)) as made,
            Exchange(made.application, "/v1/watch", "from_revision=1") as watch,
        ):
            await made.publish()
            await made.publish("2.0.0")
            await watch.until(lambda seen: bool(seen.messages))
            assert all(at >= 1 for _, at, _ in watch.messages)

    run(work())


def test_too_many_watches_are_refused_and_a_client_that_leaves_makes_room() -> None:
    async def work() -> None:
        async with api(FakeMember(WatchLimits(max_watchers=1)), SLOW) as made:
            first = Exchange(made.application, "/v1/watch")
            async with first:
                await first.until(lambda seen: len(seen.messages) == 1)
                reply = await made.client.get("/v1/watch")
                assert (reply.status_code, reply.json()["code"], reply.headers["retry-after"]) == (429, "too_many_watchers", "1")
            async with Exchange(made.application, "/v1/watch") as second:
                await second.until(lambda seen: len(seen.messages) == 1)
            assert made.member.watch.watchers == 0

    run(work())


def test_a_client_that_leaves_while_nothing_can_be_sent_is_let_go() -> None:
    async def work() -> None:
        async with api(limits=SLOW) as made:
            watch = Exchange(made.application, "/v1/watch", "from_revision=0")
            async with watch:
                await watch.until(lambda seen: len(seen.messages) == 1)
                watch.blocked = asyncio.Event()
                await made.publish()
                await asyncio.sleep(0.01)
            assert made.member.watch.watchers == 0

    run(work())


def test_watches_end_in_good_order_when_the_member_stops() -> None:
    async def work() -> None:
        async with api(limits=SLOW) as made:
            async with Exchange(made.application, "/v1/watch") as watch:
                await watch.until(lambda seen: len(seen.messages) == 1)
                made.member.watch.close()
                await watch.until(lambda seen: seen.complete)
                assert watch.messages[-1][0] == "bookmark"
            reply = await made.client.get("/v1/watch")
            assert (reply.status_code, reply.json()["code"]) == (503, "shutting_down")

    run(work())


def test_a_wrong_resource_or_revision_is_refused_with_what_is_known() -> None:
    async def work() -> None:
        async with api() as made:
            for query in (
                "resource=modles",
                "resource=",
                "from_revision=-1",
                "from_revision=1.5",
                "consistency=stale",
                "from_revision=1&from_revision=2",
            ):
                reply = await made.client.get(f"/v1/watch?{query}")
                assert (reply.status_code, reply.json()["code"]) == (422, "bad_field"), query
            assert "models, versions, deployments" in (await made.client.get("/v1/watch?resource=modles")).json()["detail"]

    run(work())


def test_the_client_library_reads_the_stream() -> None:
    async def work() -> None:
        async with api(limits=SLOW) as made:
            await made.publish()
            async with Exchange(made.application, "/v1/watch", "from_revision=0") as watch:
                await watch.until(lambda seen: len(seen.messages) == 2)
                assert [event.event for event in SseParser().feed(watch.body)] == ["change", "bookmark"]

    run(work())


def test_an_event_is_rendered_once_for_all_watchers() -> None:
    async def work() -> None:
        async with api(limits=SLOW) as made:
            await made.publish()
            async with Exchange(made.application, "/v1/watch", "from_revision=0") as one:
                await one.until(lambda seen: len(seen.messages) == 2)
                rendered = made.member.watch._ring[0].rendered
                async with Exchange(made.application, "/v1/watch", "from_revision=0") as two:
                    await two.until(lambda seen: len(seen.messages) == 2)
                    assert made.member.watch._ring[0].rendered is rendered
                    assert two.messages == one.messages

    run(work())
