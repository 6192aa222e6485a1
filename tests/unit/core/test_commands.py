"""The bytes of commands are for ever: golden values, and what a reader refuses."""

from __future__ import annotations

import msgspec
import pytest

from raftmeta.core import commands as c
from raftmeta.core.errors import CODES, ErrorClass, RaftmetaError
from raftmeta.core.types import Basis, DrainOverdue, Phase, Policy, Side, SideName, Stage, StageCounters, VectorFrom, VersionSummary

SUMMARY = VersionSummary("a", "b", "c", "d", "e", 1, 2, 3, 4)
PUBLISH = c.Publish("m", "1", SUMMARY, b"\x00")
GOLDEN: list[tuple[c.Body, str]] = [
    (PUBLISH, "9501a16da13199a161a162a163a164a16501020304c40100"),
    (c.PublishBatch((PUBLISH,)), "9202919501a16da13199a161a162a163a164a16501020304c40100"),
    (c.DeleteVersion("m", "1"), "9303a16da131"),
    (c.DeclareDeployment("d", "m", Side("a", ("n",)), None, Policy(1, 2)), "9604a164a16d92a16191a16ec0920102"),
    (
        c.DeclareDeployment("d", "m", Side("a", ("n",)), None, Policy(1, 2, 3, DrainOverdue.CANCEL)),
        "9604a164a16d92a16191a16ec094010203a663616e63656c",
    ),
    (c.Activate("d", "1", None, "r"), "9505a164a131c0a172"),
    (c.RollBack("d", "2", "r"), "9406a164a132a172"),
    (
        c.Attest("r", "n", SideName.PRIMARY, Stage.READY, "x", "y", "b", StageCounters(), "", ""),
        "9b07a172a16ea77072696d617279a57265616479a178a179a1629800000000000000ffa0a0",
    ),
    (c.AdvanceRollout("r", Phase.SYNCING), "9308a172a773796e63696e67"),
    (c.AbortRollout("r", "c", "n", ""), "9509a172a163a16ea0"),
    (c.RecordVerdict("d", "consistent", b"{}"), "940aa164aa636f6e73697374656e74c4027b7d"),
    (
        c.RecordCheck("d", "consistent", "s", b"{}", Basis(1, 300, "v", 301, 4, 7)),
        "960da164aa636f6e73697374656e74a173c4027b7d9601cd012ca176cd012d0407",
    ),
    (c.FailOver("d", SideName.STANDBY, SideName.PRIMARY, 300, True), "960ea164a77374616e646279a77072696d617279cd012cc3"),
    (
        c.RecordEvidence("d", "a1", 1, 300, "v", "c", "w", VectorFrom.MEMORY, "e", "f", "", "b", 70_000, 5, "found"),
        "dc00100ca164a2613101cd012ca176a163a177a66d656d6f7279a165a166a0a162ce0001117005a5666f756e64",
    ),
    (c.RaiseFeatureLevel(2), "920b02"),
]


@pytest.mark.parametrize(("body", "golden"), GOLDEN)
def test_the_bytes_of_a_body_stay_what_they_are(body: c.Body, golden: str) -> None:
    assert c.encode_body(body).hex() == golden
    assert c.decode_body(bytes.fromhex(golden)) == body


def test_there_is_a_golden_value_for_every_body() -> None:
    assert {type(body) for body, _ in GOLDEN} == set(c.Body.__args__)


def test_a_command_is_its_envelope_around_its_body() -> None:
    command = c.Command(c.SCHEMA, "k", "p", "s", 5, PUBLISH)
    data = c.encode(command)
    assert data.hex() == "9601a16ba170a17305" + GOLDEN[0][1]
    assert c.decode(data) == command
    envelope = c.open_envelope(data)
    assert (envelope.request_id, envelope.principal, envelope.source, envelope.stamped_ms) == ("k", "p", "s", 5)
    assert bytes(envelope.body) == c.encode_body(PUBLISH)


@pytest.mark.parametrize("data", [b"", b"\x90", b"\x96\x01", b"\xc1", b"\x92\x0c\x01", b"\x92\x0b\xa1x"])
def test_bytes_that_are_no_command_raise_only_decoding_errors(data: bytes) -> None:
    for decode in (c.decode, c.open_envelope, c.decode_body):
        with pytest.raises(msgspec.MsgspecError):
            decode(data)


def test_an_error_carries_its_code_and_what_to_do_next() -> None:
    error = RaftmetaError("rollout_in_progress", "rollout 'r1' runs", rollout_id="r1")
    assert str(error) == "rollout_in_progress: rollout 'r1' runs"
    assert (error.code, error.detail, error.params) == ("rollout_in_progress", "rollout 'r1' runs", {"rollout_id": "r1"})
    assert (error.info.error_class, error.info.status) == (ErrorClass.REJECTED, 409)


def test_an_error_without_a_listed_code_cannot_be_made() -> None:
    with pytest.raises(AssertionError):
        RaftmetaError("no_such_code", "")


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_a_status_that_fits_its_class(code: str) -> None:
    info = CODES[code]
    allowed = {
        ErrorClass.INVALID: range(400, 500),
        ErrorClass.REJECTED: (409, 410, 412),
        ErrorClass.UNAVAILABLE: (503,),
        ErrorClass.CAPACITY: (429, 507),
        ErrorClass.INTEGRITY: (500,),
    }
    assert info.status in allowed[info.error_class]
    assert info.title
