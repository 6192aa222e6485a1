"""What the log can answer, as callers see it: codes, keys that stay good, bounds on waiting, and what a retry finds."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from api.service import ApiLimits
from raftmeta.core.errors import CODES
from tests.support.fake_log import FakeMember
from tests.unit.api.harness import MODEL, PUBLISH, api, manifest, run

QUICK = ApiLimits(revision_wait_s=0.05)
BODY = {"manifest": manifest()}


def check(reply: httpx.Response, code: str) -> None:
    assert reply.json()["code"] == code, reply.text
    assert reply.status_code == CODES[code].status
    if CODES[code].status == 503:
        assert int(reply.headers["retry-after"]) >= 1


@pytest.mark.parametrize(("switch", "code"), [("no_leader", "no_leader"), ("lose", "unknown_outcome"), ("not_applied", "not_applied")])
def test_a_write_that_the_log_did_not_take_can_be_repeated_under_its_key(switch: str, code: str) -> None:
    async def work() -> None:
        async with api() as made:
            setattr(made.member.log.switches, switch, True)
            reply = await made.client.put(PUBLISH, json=BODY)
            check(reply, code)
            assert made.member.state.revision == 0
            setattr(made.member.log.switches, switch, False)
            again = await made.client.put(PUBLISH, json=BODY, headers={"idempotency-key": reply.headers["idempotency-key"]})
            assert again.status_code == 201

    run(work())


def test_a_write_whose_outcome_is_unknown_is_applied_once_however_often_it_is_repeated() -> None:
    async def work() -> None:
        async with api() as made:
            made.member.log.switches.unknown = True
            reply = await made.client.put(PUBLISH, json=BODY, headers={"idempotency-key": "k"})
            check(reply, "unknown_outcome")
            assert made.member.state.revision == 1
            made.member.log.switches.unknown = False
            again = await made.client.put(PUBLISH, json=BODY, headers={"idempotency-key": "k"})
            assert (again.status_code, again.headers["idempotency-replayed"]) == (201, "true")
            assert (again.headers["x-raftmeta-revision"], again.json()["published_revision"]) == ("1", 1)
            assert made.member.state.revision == 1

    run(work())


def test_a_refusal_says_whether_it_is_what_became_of_the_command() -> None:
    async def work() -> None:
        async with api() as made:
            for _ in range(2):  # the second time as the known outcome of the key
                judged = await made.client.delete(PUBLISH, headers={"idempotency-key": "k"})
                assert (judged.status_code, judged.headers["x-raftmeta-judged"]) == (404, "true")
            made.member.log.switches.no_leader = True
            for refused in (
                await made.client.delete(PUBLISH),
                await made.client.put(PUBLISH, json={}),
                await made.client.get("/v1/models/x"),
            ):
                assert refused.status_code >= 400 and "x-raftmeta-judged" not in refused.headers

    run(work())


def test_a_key_with_another_body_is_refused() -> None:
    async def work() -> None:
        async with api() as made:
            await made.publish(**{"idempotency-key": "k"})
            check(await made.publish("2.0.0", **{"idempotency-key": "k"}), "idempotency_reused")
            assert made.member.state.revision == 1

    run(work())


def test_a_retried_publish_never_answers_with_the_bytes_that_took_its_label_since() -> None:
    async def work() -> None:
        async with api() as made:
            first = await made.publish(**{"idempotency-key": "k"})
            assert first.status_code == 201
            assert (await made.client.delete(PUBLISH)).status_code == 200
            check(await made.publish(**{"idempotency-key": "k"}), "unknown_version")
            assert (await made.publish(number=1)).status_code == 201
            check(await made.publish(**{"idempotency-key": "k"}), "unknown_version")
            batch = {"items": [{"label": "b", "manifest": manifest()}]}
            path = f"{MODEL}/versions:batch"
            assert (await made.client.post(path, json=batch, headers={"idempotency-key": "kb"})).status_code == 200
            assert (await made.client.delete(f"{MODEL}/versions/b")).status_code == 200
            assert (await made.publish("b", number=1)).status_code == 201
            check(await made.client.post(path, json=batch, headers={"idempotency-key": "kb"}), "unknown_version")

    run(work())


def test_a_retried_activation_is_the_same_rollout() -> None:
    async def work() -> None:
        async with api() as made:
            await made.prepared()
            made.member.log.switches.unknown = True
            sent = {"version": "1.0.0"}
            check(await made.client.post("/v1/deployments/search/activate", json=sent, headers={"idempotency-key": "k"}), "unknown_outcome")
            made.member.log.switches.unknown = False
            again = await made.client.post("/v1/deployments/search/activate", json=sent, headers={"idempotency-key": "k"})
            assert again.status_code == 202
            assert list(made.member.state.rollouts) == [again.json()["rollout_id"]]

    run(work())


def test_a_key_is_made_with_its_time_and_given_back() -> None:
    async def work() -> None:
        async with api() as made:
            reply = await made.publish()
            time_ms, _, rest = reply.headers["idempotency-key"].partition("-")
            assert (len(time_ms), int(time_ms)) == (13, made.member.log.now_ms)
            assert len(rest) >= 16
            assert made.member.log.proposed[0].request_id == reply.headers["idempotency-key"]

    run(work())


def test_a_made_key_is_never_behind_the_clock_of_the_cluster() -> None:
    async def work() -> None:
        async with api() as made:
            await made.publish()
            made.member.log.now_ms -= 100 * 86_400_000
            assert (await made.publish("2.0.0")).status_code == 201

    run(work())


@pytest.mark.parametrize("offset_ms", [2 * 86_400_000, -2 * 86_400_000])
def test_a_key_made_by_a_member_with_a_wrong_clock_carries_the_time_of_the_others(offset_ms: int) -> None:
    async def work() -> None:
        async with api() as made:
            right_ms = made.member.log.now_ms
            made.member.log.now_ms += offset_ms
            made.member.log.switches.clock_offset_ms = offset_ms
            reply = await made.publish()
            assert int(reply.headers["idempotency-key"].partition("-")[0]) == right_ms

    run(work())


@pytest.mark.parametrize("key", ["", "a b", "ü", "x" * 129])
def test_a_key_that_is_no_visible_text_is_refused(key: str) -> None:
    async def work() -> None:
        async with api() as made:
            reply = await made.client.put(PUBLISH, json=BODY, headers=[(b"idempotency-key", key.encode("latin-1"))])
            check(reply, "bad_field")
            assert made.member.log.proposed == []

    run(work())


def test_who_wrote_reads_it_back_from_the_same_member() -> None:
    async def work() -> None:
        async with api(limits=ApiLimits(revision_wait_s=5)) as made:
            made.member.log.switches.lag = True
            writing = asyncio.create_task(made.publish())
            await asyncio.sleep(0.02)
            assert not writing.done()
            made.member.log.catch_up()
            assert (await writing).status_code == 201
            assert (await made.client.get(PUBLISH + "?consistency=stale")).status_code == 200

    run(work())


def test_a_member_that_stays_behind_says_so_and_the_retry_finds_the_write() -> None:
    async def work() -> None:
        async with api(limits=QUICK) as made:
            made.member.log.switches.lag = True
            reply = await made.client.put(PUBLISH, json=BODY)
            check(reply, "revision_not_reached")
            made.member.log.catch_up()
            again = await made.client.put(PUBLISH, json=BODY, headers={"idempotency-key": reply.headers["idempotency-key"]})
            assert (again.status_code, again.headers["x-raftmeta-revision"]) == (201, "1")

    run(work())


def test_reads_are_linearizable_unless_asked_otherwise() -> None:
    async def work() -> None:
        async with api() as made:
            await made.publish()
            made.member.log.switches.no_leader = True
            check(await made.client.get(PUBLISH), "no_leader")
            check(await made.client.get(PUBLISH + "?consistency=linearizable"), "no_leader")
            reply = await made.client.get(PUBLISH + "?consistency=stale")
            assert (reply.status_code, reply.headers["x-raftmeta-staleness-ms"]) == (200, "3")

    run(work())


def test_a_stale_read_is_refused_beyond_its_bound() -> None:
    async def work() -> None:
        async with api() as made:
            await made.publish()
            made.member.log.switches.staleness_ms = 250.4
            check(await made.client.get(f"{MODEL}?consistency=stale&max_stale_ms=250"), "stale")
            reply = await made.client.get(f"{MODEL}?consistency=stale&max_stale_ms=251")
            assert (reply.status_code, reply.headers["x-raftmeta-staleness-ms"]) == (200, "251")
            made.member.log.switches.staleness_ms = float("inf")
            assert (await made.client.get(f"{MODEL}?consistency=stale")).headers["x-raftmeta-staleness-ms"] == "unknown"
            check(await made.client.get(f"{MODEL}?consistency=stale&max_stale_ms=86400000"), "stale")

    run(work())


def test_min_revision_waits_a_bounded_time_for_a_stale_read() -> None:
    async def work() -> None:
        async with api(limits=QUICK) as made:
            check(await made.client.get("/v1/models?consistency=stale&min_revision=1"), "revision_not_reached")
        async with api(limits=ApiLimits(revision_wait_s=5)) as made:
            reading = asyncio.create_task(made.client.get("/v1/models?consistency=stale&min_revision=1"))
            await asyncio.sleep(0.02)
            await made.publish()
            reply = await reading
            assert (reply.status_code, reply.headers["x-raftmeta-revision"], len(reply.json()["items"])) == (200, "1", 1)

    run(work())


def test_outcomes_that_come_from_another_thread_reach_every_caller() -> None:
    async def work() -> None:
        async with api(FakeMember(threaded=True)) as made:
            replies = await asyncio.gather(*(made.publish(f"1.{number}", number) for number in range(50)))
            assert {reply.status_code for reply in replies} == {201}
            assert sorted(reply.json()["number"] for reply in replies) == list(range(1, 51))
            reads = await asyncio.gather(*(made.client.get(f"{MODEL}/versions/1.{number}") for number in range(50)))
            assert {reply.status_code for reply in reads} == {200}

    run(work())


def test_the_same_key_twice_at_once_gets_one_outcome() -> None:
    async def work() -> None:
        async with api(FakeMember(threaded=True)) as made:
            replies = await asyncio.gather(*(made.publish(**{"idempotency-key": "k"}) for _ in range(5)))
            assert {(reply.status_code, reply.headers["x-raftmeta-revision"]) for reply in replies} == {(201, "1")}

    run(work())


def test_too_many_requests_at_once_are_refused_and_the_rest_is_answered() -> None:
    async def work() -> None:
        async with api(limits=ApiLimits(max_in_flight=3)) as made:
            made.member.log.switches.hold = True
            waiting = [asyncio.create_task(made.publish(f"1.{number}", number)) for number in range(3)]
            await asyncio.sleep(0.02)
            reply = await made.client.get("/v1/models?consistency=stale")
            check(reply, "too_many_requests")
            assert (await made.client.get("/livez")).status_code == 200
            assert (await made.client.get("/readyz")).status_code == 200
            made.member.log.release()
            assert {reply.status_code for reply in await asyncio.gather(*waiting)} == {201}
            assert made.service.in_flight == 0

    run(work())


def test_a_fault_of_ours_is_an_internal_problem_that_shows_nothing_inside(capsys: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        async with api() as made:
            made.member.nodes = None  # type: ignore[assignment]
            reply = await made.client.get("/v1/nodes")
            check(reply, "internal")
            assert "NoneType" not in reply.text

    run(work())
    assert "NoneType" in capsys.readouterr().out  # the member's own log says it
