"""Fail-over and retries: what is repeated, under which key, for how long, and what the last error says."""

from __future__ import annotations

import gzip
import re
import ssl

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmeta.client import Client, Options, RaftmetaError, Read, backoff
from raftmeta.client.course import OWN_TROUBLE
from raftmeta.core.errors import CODES, ErrorClass
from tests.unit.client.members import Handler, Members, breaks, dead, in_turn, ok, problem, run

A, B, C = "http://a:1", "http://b:1", "http://c:1"


def activate(members: Members, urls: tuple[str, ...] = (A, B, C), **options: object) -> object:
    async def call() -> object:
        async with Client(urls, options=members.options(**options)) as client:
            return await client.activate("search", "v2")

    return run(call())


def keys(members: Members) -> set[str]:
    return {request.headers["idempotency-key"] for request in members.requests}


def test_a_dead_member_is_passed_over_without_a_pause() -> None:
    members = Members({"a": dead, "b": ok({"rollout_id": "r"}), "c": dead})
    assert activate(members) == {"rollout_id": "r"}
    assert members.hosts() == ["a", "b"] and members.time.sleeps == []


def test_the_member_that_answered_is_asked_first_afterwards() -> None:
    members = Members({"a": dead, "b": ok({}), "c": dead})

    async def calls() -> str:
        async with Client([A, B, C], options=members.options()) as client:
            await client.cluster()
            await client.cluster()
            return client.current_url

    assert run(calls()) == B
    assert members.hosts() == ["a", "b", "b"]


def test_a_mutation_keeps_one_key_over_all_attempts() -> None:
    members = Members({"a": in_turn(problem("no_leader"), ok({})), "b": breaks, "c": problem("unknown_outcome")})
    reply = activate(members)
    assert members.hosts() == ["a", "b", "c", "a"]
    (key,) = keys(members)
    assert re.fullmatch(r"1700000000000-[0-9a-f]{16}", key)
    assert reply.key == key  # type: ignore[attr-defined]


def test_two_calls_have_two_keys_and_a_given_key_is_used_as_it_is() -> None:
    members = Members({"a": ok({})})

    async def calls() -> None:
        async with Client([A], options=members.options()) as client:
            await client.activate("search", "v2")
            await client.activate("search", "v2")
            await client.activate("search", "v2", key="mine")

    run(calls())
    assert len(keys(members)) == 3 and "mine" in keys(members)


def test_reads_carry_no_key() -> None:
    members = Members({"a": ok({})})

    async def call() -> None:
        async with Client([A], options=members.options()) as client:
            await client.get_deployment("search", Read(stale=True, max_stale_ms=200, min_revision=9))

    run(call())
    (request,) = members.requests
    assert "idempotency-key" not in request.headers
    assert dict(request.url.params) == {"consistency": "stale", "max_stale_ms": "200", "min_revision": "9"}


@pytest.mark.parametrize("code", sorted(code for code, info in CODES.items() if info.error_class is not ErrorClass.UNAVAILABLE))
def test_an_answer_that_decides_is_not_asked_for_again(code: str) -> None:
    if code in backoff.RETRIED | OWN_TROUBLE:
        return
    members = Members({"a": problem(code), "b": ok({}), "c": ok({})})
    with pytest.raises(RaftmetaError, match=f"because {code}") as raised:
        activate(members)
    assert raised.value.code == code and members.hosts() == ["a"]


@pytest.mark.parametrize("code", sorted(backoff.RETRIED))
def test_an_unavailable_member_is_followed_by_the_next(code: str) -> None:
    members = Members({"a": problem(code), "b": ok({"rollout_id": "r"}), "c": dead})
    assert activate(members) == {"rollout_id": "r"}


def unreadable(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, content=b"[" * 100_000)


def compressed(request: httpx.Request) -> httpx.Response:
    """Two kilobytes that would be two megabytes."""
    return httpx.Response(200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(gzip.compress(b" " * (2 << 20))))


def garbled(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b"this is not gzip"))


def undecodable(request: httpx.Request) -> httpx.Response:
    raise httpx.DecodingError("incorrect header check", request=request)


BROKEN = [*map(problem, sorted(OWN_TROUBLE)), unreadable, compressed, garbled, undecodable]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_member_that_answers_everything_with_its_own_trouble_does_not_speak_for_the_others(broken: Handler) -> None:
    members = Members({"a": broken, "b": dead, "c": ok({"rollout_id": "r"})})
    assert activate(members) == {"rollout_id": "r"}
    assert members.hosts() == ["a", "b", "c"] and len(keys(members)) == 1


@pytest.mark.parametrize("code", sorted(OWN_TROUBLE))
def test_what_every_member_that_is_there_answers_ends_the_call_in_one_round(code: str) -> None:
    members = Members({"a": problem(code), "b": dead, "c": problem(code)})
    with pytest.raises(RaftmetaError, match=f"because {code}") as raised:
        activate(members, (A, B, C)) if code != "internal" else cluster(members)
    assert raised.value.code == code and members.hosts() == ["a", "b", "c"] and members.time.sleeps == []


def test_an_unexpected_fault_of_the_only_member_is_told_as_what_it_is() -> None:
    with pytest.raises(RaftmetaError) as raised:
        activate(Members({"a": problem("internal")}), (A,))
    assert raised.value.code == "internal"


def test_a_mutation_whose_success_cannot_be_read_is_not_called_refused() -> None:
    with pytest.raises(RaftmetaError, match="bad_json") as raised:
        activate(Members({"a": unreadable}), (A,))
    assert raised.value.code == "unknown_outcome"


def cluster(members: Members) -> None:
    async def call() -> None:
        async with Client([A, B, C], options=members.options()) as client:
            await client.cluster()

    run(call())


def test_replies_are_asked_for_as_they_are() -> None:
    members = Members({"a": ok({})})
    cluster(members)
    assert members.requests[0].headers["accept-encoding"] == "identity"


DECIDE_NOTHING = ["disk_full", "integrity", "internal", "unauthenticated", "forbidden", "failover_refused", "bad_field"]


@pytest.mark.parametrize("code", DECIDE_NOTHING)
def test_after_a_lost_reply_an_answer_that_judged_nothing_leaves_the_outcome_open(code: str) -> None:
    members = Members({"a": breaks, "b": problem(code), "c": problem(code)})
    with pytest.raises(RaftmetaError, match=f"{code}: because {code}") as raised:
        activate(members)
    assert raised.value.code == "unknown_outcome" and members.hosts() == ["a", "b", "c"]


@pytest.mark.parametrize("code", ["unsupported_command", "feature_level_unsupported", "idempotency_expired"])
def test_after_a_lost_reply_a_refusal_that_may_precede_the_look_at_the_key_leaves_the_outcome_open(code: str) -> None:
    members = Members({"a": breaks, "b": problem(code, {"x-raftmeta-judged": "true"})})
    with pytest.raises(RaftmetaError) as raised:
        activate(members, (A, B))
    assert raised.value.code == "unknown_outcome"


@pytest.mark.parametrize("code", ["failover_refused", "rollout_in_progress", "unknown_deployment"])
def test_after_a_lost_reply_the_judgement_of_the_command_is_the_outcome(code: str) -> None:
    members = Members({"a": breaks, "b": problem(code, {"x-raftmeta-judged": "true"}), "c": ok({})})
    with pytest.raises(RaftmetaError) as raised:
        activate(members)
    assert raised.value.code == code and members.hosts() == ["a", "b"]


@pytest.mark.parametrize("code", DECIDE_NOTHING)
def test_after_a_lost_reply_the_members_that_judge_nothing_are_passed_over(code: str) -> None:
    members = Members({"a": breaks, "b": problem(code), "c": ok({"rollout_id": "r"})})
    assert activate(members) == {"rollout_id": "r"}


def test_a_lost_reply_does_not_make_the_refusal_of_a_read_unsure() -> None:
    members = Members({"a": breaks, "b": problem("not_found"), "c": ok({})})
    with pytest.raises(RaftmetaError) as raised:
        cluster(members)
    assert raised.value.code == "not_found" and members.hosts() == ["a", "b"]


def test_a_full_round_of_failures_waits_and_waits_longer_each_time_up_to_the_deadline() -> None:
    members = Members({"a": dead, "b": dead, "c": dead})
    with pytest.raises(RaftmetaError):
        activate(members, timeout_s=2.0)
    sleeps = members.time.sleeps
    assert sleeps == sorted(sleeps) and len(set(sleeps)) > 3
    assert sum(sleeps) < 2.0
    assert len(members.requests) == 3 * (len(sleeps) + 1)


@pytest.mark.parametrize(
    ("handler", "code"),
    [(dead, "not_applied"), (breaks, "unknown_outcome"), (problem("no_leader"), "no_leader"), (problem("not_applied"), "not_applied")],
)
def test_the_last_error_says_whether_a_mutation_may_have_been_applied(handler: Handler, code: str) -> None:
    members = Members({"a": handler})
    with pytest.raises(RaftmetaError) as raised:
        activate(members, (A,), timeout_s=0.5)
    assert raised.value.code == code


def test_one_attempt_of_unknown_outcome_makes_the_whole_call_unknown() -> None:
    members = Members({"a": in_turn(breaks, dead)})
    with pytest.raises(RaftmetaError) as raised:
        activate(members, (A,), timeout_s=0.5)
    assert raised.value.code == "unknown_outcome"


def test_a_write_that_a_lagging_member_has_not_seen_yet_ends_as_unknown_not_as_refused() -> None:
    members = Members({"a": problem("revision_not_reached")})
    with pytest.raises(RaftmetaError) as raised:
        activate(members, (A,), timeout_s=0.5)
    assert raised.value.code == "unknown_outcome"


def test_a_member_that_asks_for_time_gets_it_but_never_more_than_the_bound() -> None:
    members = Members({"a": in_turn(problem("overloaded", {"retry-after": "2"}), problem("overloaded", {"retry-after": "900"}), ok({}))})
    activate(members, (A,), timeout_s=60)
    assert members.time.sleeps == [2.0, backoff.RetryPolicy().longest_retry_after_s]


def test_retry_after_of_an_election_is_not_waited_for() -> None:
    members = Members({"a": in_turn(problem("no_leader", {"retry-after": "1"}), ok({}))})
    activate(members, (A,))
    assert sum(members.time.sleeps) < 0.1


def test_each_retry_is_told() -> None:
    told: list[str] = []
    members = Members({"a": dead, "b": ok({})})
    activate(members, (A, B), on_retry=told.append)
    assert len(told) == 1 and "connection refused" in told[0] and A in told[0]


def test_a_redirect_is_refused_and_the_token_goes_nowhere_else() -> None:
    members = Members({"a": lambda request: httpx.Response(307, headers={"location": "http://evil:1/"})})
    with pytest.raises(RaftmetaError) as raised:
        activate(members, (A,), token="secret")
    assert raised.value.code == "bad_request" and members.hosts() == ["a"]
    assert members.requests[0].headers["authorization"] == "Bearer secret"


def untrusted(request: httpx.Request) -> httpx.Response:
    cause = ssl.SSLCertVerificationError("self-signed certificate")
    cause.verify_message = "self-signed certificate"
    raise httpx.ConnectError("tls", request=request) from cause


def test_members_whose_certificates_are_not_trusted_end_the_call_at_once() -> None:
    members = Members({"a": untrusted, "b": untrusted})
    with pytest.raises(RaftmetaError, match="not trusted here: self-signed certificate") as raised:
        activate(members, (A, B))
    assert raised.value.code == "unauthenticated" and members.hosts() == ["a", "b"]


def test_one_member_with_a_strange_certificate_does_not_end_the_call() -> None:
    members = Members({"a": untrusted, "b": in_turn(problem("no_leader"), ok({"rollout_id": "r"}))})
    assert activate(members, (A, B)) == {"rollout_id": "r"}


@given(st.integers(0, 200), st.floats(0, 1, exclude_max=True))
def test_waits_are_bounded_and_never_zero(round_number: int, draw: float) -> None:
    policy = backoff.RetryPolicy()
    assert 0 < backoff.wait_s(policy, round_number, draw) <= policy.longest_wait_s


@pytest.mark.parametrize("url", ["", "ftp://a", "http://user:pw@a:1", "http://a:1?x=1", "a:7400", "http://"])
def test_an_address_that_is_no_member_url_is_refused(url: str) -> None:
    with pytest.raises(RaftmetaError) as raised:
        Client([url])
    assert raised.value.code == "bad_field"


def test_no_address_at_all_is_refused() -> None:
    with pytest.raises(RaftmetaError, match="at least one member"):
        Client([], options=Options())
