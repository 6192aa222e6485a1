"""The log does not answer, or is another one by then: every request ends, and none with what the member does not know."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest

from api.service import ApiLimits
from raftmeta.core.commands import Activate
from raftmeta.core.state import State
from tests.support.fake_log import FakeLog, FakeMember
from tests.unit.api.harness import DEPLOYMENT, MODEL, PUBLISH, Api, api, manifest, run

SHORT = ApiLimits(write_timeout_s=0.01, read_timeout_s=0.01, revision_wait_s=0.01)
BODY = {"manifest": manifest(7)}


def code_of(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["code"]


def test_a_write_and_a_read_end_although_the_log_is_held_up_and_a_retry_finds_the_truth() -> None:
    async def work() -> None:
        async with api(limits=SHORT) as made:
            made.member.log.switches.hold = True
            written, read = await asyncio.gather(made.client.put(PUBLISH, json=BODY), made.client.get(PUBLISH))
            assert code_of(written) == (503, "unknown_outcome")
            assert code_of(read) == (503, "no_quorum")
            assert int(written.headers["retry-after"]) >= 1
            made.member.log.release()
            again = await made.client.put(PUBLISH, json=BODY, headers={"idempotency-key": written.headers["idempotency-key"]})
            assert (again.status_code, again.headers["x-raftmeta-revision"]) == (201, "1")

    run(work())


def begin_again(member: FakeMember) -> None:
    """As a member does that found itself wrong: another log, and a state that is made anew."""
    member.log, member.state = FakeLog(member._published), State.empty()
    member.watch.begin_again(0)


async def meanwhile(made: Api, request: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
    """The log answers, and the member begins again before the request goes on."""
    former = made.member.log
    former.switches.hold = True
    asking = asyncio.create_task(request)
    while not former._held:
        await asyncio.sleep(0)
    former.release()
    begin_again(made.member)
    reply = await asking
    assert made.member.state.revision == 0
    return reply


def test_a_read_whose_member_began_again_after_the_barrier_is_not_answered_from_the_new_state() -> None:
    async def work() -> None:
        async with api(limits=SHORT) as made:
            await made.publish()
            assert code_of(await meanwhile(made, made.client.get(MODEL))) == (503, "starting")

    run(work())


def test_a_stale_read_that_waits_for_a_revision_is_not_answered_from_a_state_of_an_unknown_age() -> None:
    async def work() -> None:
        async with api() as made:
            await made.publish()
            asking = asyncio.create_task(made.client.get(MODEL + "?consistency=stale&min_revision=2"))
            await asyncio.sleep(0.02)
            begin_again(made.member)
            await made.publish("1.0.0", 1)
            await made.publish("2.0.0", 2)
            assert code_of(await asking) == (503, "starting")

    run(work())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/versions/2.0.0", BODY),
        ("/versions:batch", {"items": [{"label": "2.0.0", **BODY}]}),
        ("", DEPLOYMENT),
    ],
    ids=["publish", "batch", "declare"],
)
def test_a_write_whose_member_began_again_is_not_answered_as_if_it_had_been_undone(path: str, body: dict[str, Any]) -> None:
    async def work() -> None:
        async with api(limits=SHORT) as made:
            await made.publish()
            send = made.client.post if path.endswith(":batch") else made.client.put
            reply = await meanwhile(made, send(MODEL + path if path else "/v1/deployments/search", json=body))
            assert code_of(reply) == (503, "revision_not_reached")

    run(work())


@pytest.mark.parametrize("path", [MODEL, MODEL + "?min_revision=2", MODEL + "?consistency=stale&min_revision=2"])
def test_a_read_that_waits_when_a_majority_contradicts_its_member_is_not_answered_from_its_state(path: str) -> None:
    async def work() -> None:
        async with api() as made:
            await made.publish()
            made.member.log.switches.hold = "min_revision" not in path
            asking = asyncio.create_task(made.client.get(path))
            await asyncio.sleep(0.02)
            made.member.unsound = "a majority of the members has another state"
            made.member.log.release()
            made.member.log.propose(Activate("none", "none", None, "none"), "key", "anonymous", 1.0)  # refused, at revision 2
            status, code = code_of(await asking)
            assert (status, code) in ((503, "starting"), (503, "revision_not_reached"))

    run(work())


def test_a_write_of_a_member_that_is_contradicted_meanwhile_is_not_answered_from_its_state_nor_as_if_it_had_been_undone() -> None:
    async def work() -> None:
        async with api() as made:
            made.member.log.switches.hold = True
            asking = asyncio.create_task(made.client.put(PUBLISH, json=BODY))
            await asyncio.sleep(0.02)
            made.member.unsound = "a majority of the members has another state"
            made.member.log.release()
            assert code_of(await asking) == (503, "revision_not_reached")

    run(work())
