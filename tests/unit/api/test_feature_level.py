"""The feature level over the API: raising it, and what is refused below it before anything is proposed."""

from __future__ import annotations

import msgspec
import pytest

from raftmeta.log.port import LogStatus
from tests.support.fake_log import FakeMember
from tests.unit.api.harness import DEPLOYMENT, Api, api, run

DRAIN = {**DEPLOYMENT, "policy": {"drain_overdue": "cancel"}}


class MixedMember(FakeMember):
    """Of a cluster at level 1 whose other member runs another build."""

    def __init__(self, other: int) -> None:
        super().__init__()
        self.log.state = self.state = msgspec.structs.replace(self.state, feature_level=1)
        plain = self.log.status

        def status() -> LogStatus:
            shown = plain()
            second = msgspec.structs.replace(shown.members[0], id="m2", role="follower", feature_level=other)
            return msgspec.structs.replace(shown, members=(*shown.members, second))

        self.log.status = status  # type: ignore[method-assign]


async def declared(made: Api, body: object = DEPLOYMENT) -> tuple[int, str]:
    response = await made.client.put("/v1/deployments/search", json=body)
    return response.status_code, response.json().get("code", "")


def test_a_drain_policy_waits_for_level_two_and_nothing_is_proposed_before() -> None:
    async def work() -> None:
        async with api(MixedMember(2)) as made:
            await made.prepared()
            proposed = len(made.member.log.proposed)
            assert await declared(made, DRAIN) == (422, "unsupported_command")
            assert len(made.member.log.proposed) == proposed
            over = await made.client.post("/v1/deployments/search/failover", json={"to": "standby"})
            assert (over.status_code, over.json()["code"]) == (422, "unsupported_command")
            raised = await made.client.post("/v1/cluster/feature-level", json={"level": 2})
            assert (raised.status_code, raised.json()["feature_level"]) == (200, 2)
            assert await declared(made, DRAIN) == (200, "")

    run(work())


@pytest.mark.parametrize(("other", "why"), [(1, "m2 (up to 1)"), (0, "without a link: m2")])
def test_a_level_that_a_member_cannot_follow_is_not_raised_and_the_member_is_named(other: int, why: str) -> None:
    async def work() -> None:
        async with api(MixedMember(other)) as made:
            refused = await made.client.post("/v1/cluster/feature-level", json={"level": 2})
            assert (refused.status_code, refused.json()["code"]) == (409, "feature_level_unsupported")
            assert why in refused.json()["detail"]
            assert (made.member.state.feature_level, made.member.log.proposed) == (1, [])

    run(work())


def test_raising_to_the_level_of_now_says_so_and_skipping_one_is_refused() -> None:
    async def work() -> None:
        async with api() as made:
            same = await made.client.post("/v1/cluster/feature-level", json={"level": 2})
            assert (same.status_code, same.json()["feature_level"]) == (200, 2)
            refused = await made.client.post("/v1/cluster/feature-level", json={"level": 9})
            assert (refused.status_code, refused.json()["code"]) == (409, "feature_level_unsupported")

    run(work())
