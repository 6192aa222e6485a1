"""Snapshots: canonical, streamed, and refused unless every byte is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as hs

from raftmeta import codec
from raftmeta.core import commands as c
from raftmeta.core.apply import apply_batch
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.state import OUTCOME, SUPPORTED_FEATURE_LEVEL, State, encode_record, leaf
from raftmeta.core.types import Deployment, Evidence, ModelRecord, OutcomeRecord, Rollout, Verdict, VerdictHistory, VersionRecord
from tests.support.commands import (
    World,
    check,
    check_state,
    command_bytes,
    declaration,
    evidence,
    payload_lists,
    publication,
    serving_world,
    snapshot,
)

Frame = tuple[int, bytes]


def a_full_world() -> World:
    world = serving_world()
    world.ok(publication("n", "1"))
    world.ok(publication("gone", "1"))
    world.ok(c.DeleteVersion("gone", "1"))
    world.ok(declaration("e"))
    world.ok(declaration("idle"))
    world.serve("1", "r1")
    world.serve("2", "r2")
    world.start("1", "r3", "e")
    world.ok(c.RecordVerdict("d", "consistent", b"{}"))
    world.ok(c.RaiseFeatureLevel(2))
    for verdict in ("diverged", "incomplete", "consistent"):
        world.ok(check(world.state, verdict))
    for node in ("a1", "b1"):
        world.ok(evidence(node))
    return world


@cache
def full_image() -> bytes:
    return snapshot(a_full_world().state)


def frames_of(data: bytes) -> list[Frame]:
    return list(codec._read_frames([data]))


def joined(frames: list[Frame]) -> bytes:
    """A stream of these frames, which says of itself what they say."""
    return codec.MAGIC + b"".join(codec._FRAME.pack(kind, len(payload)) + payload for kind, payload in frames)


def assert_refused(data: bytes, reason: str = "") -> None:
    with pytest.raises(RaftmetaError) as caught:
        codec.restore([data])
    assert caught.value.code == "integrity"
    assert reason in caught.value.detail, caught.value.detail


def changed(kind: int, place: int, decoder: type[Any], **changes: object) -> bytes:
    """The snapshot with one record changed, frames and counts as they were."""
    frames = frames_of(full_image())
    position = [number for number, (found, _) in enumerate(frames) if found == kind][place]
    record = msgspec.msgpack.decode(frames[position][1], type=decoder)
    frames[position] = (kind, encode_record(msgspec.structs.replace(record, **changes)))
    return joined(frames)


def moved(edit: Callable[[list[Frame]], object]) -> bytes:
    frames = frames_of(full_image())
    edit(frames)
    return joined(frames)


def place_of(frames: list[Frame], kind: int, number: int = 0) -> int:
    return [place for place, (found, _) in enumerate(frames) if found == kind][number]


def test_a_restored_state_is_the_state() -> None:
    state = a_full_world().state
    restored = codec.restore(codec.snapshot_chunks(state))
    check_state(restored)
    assert snapshot(restored) == snapshot(state)
    assert restored.state_hash == state.state_hash
    assert (restored.size_bytes, restored.limits, restored.scalars) == (state.size_bytes, state.limits, state.scalars)
    for table in ("models", "versions", "manifests", "deployments", "rollouts", "verdicts", "history"):
        assert dict(getattr(restored, table)) == dict(getattr(state, table))
    assert list(restored.outcomes.items()) == list(state.outcomes.items())


def test_the_empty_state_has_a_snapshot() -> None:
    assert snapshot(codec.restore([snapshot(State.empty())])) == snapshot(State.empty())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(hs.data())
def test_where_the_stream_is_cut_does_not_matter(data: hs.DataObject) -> None:
    image = full_image()
    cuts = sorted(data.draw(hs.lists(hs.integers(0, len(image)), max_size=12)))
    chunks = [image[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(image)], strict=True)]
    assert snapshot(codec.restore(chunks)) == image


def test_a_stream_of_single_bytes_is_read() -> None:
    image = full_image()
    assert snapshot(codec.restore(image[place : place + 1] for place in range(len(image)))) == image


def test_the_order_in_which_things_happened_does_not_show() -> None:
    """Equal states have equal bytes, however their sequences were cut on the way."""

    def built(labels: list[str]) -> State:
        payloads = [command_bytes(publication(label, "1"), f"k{label}") for label in labels]
        state = apply_batch(State.empty(), payloads).state
        of_outcomes = sum(leaf(OUTCOME, key, record) for key, record in state.outcomes.items())
        return msgspec.structs.replace(state, outcomes=State.empty().outcomes, hash_sum=state.hash_sum - of_outcomes)

    names = [f"m{number:03}" for number in range(200)]
    one, other = built(names), built(names[:1] + names[:0:-1])
    assert list(one.model_names) == list(other.model_names)
    assert [kind for kind, _ in frames_of(snapshot(one))] == [kind for kind, _ in frames_of(snapshot(other))]


def test_chunks_are_bounded_and_large_states_are_streamed() -> None:
    world = World()
    for number in range(4):
        world.ok(publication("m", str(number), manifest=bytes([number]) * 600_000))
    chunks = list(codec.snapshot_chunks(world.state))
    assert len(chunks) > 8
    assert {len(chunk) for chunk in chunks[:-1]} == {codec.CHUNK_BYTES}
    assert len(chunks[-1]) < codec.CHUNK_BYTES
    assert snapshot(codec.restore(chunks)) == b"".join(chunks)


def test_more_records_than_one_bulk_are_restored() -> None:
    payloads = [command_bytes(publication("m", str(number)), f"k{number}") for number in range(codec.BULK + 10)]
    state = apply_batch(State.empty(), payloads).state
    assert snapshot(codec.restore(codec.snapshot_chunks(state))) == snapshot(state)


def test_a_key_that_stands_twice_is_refused_however_far_apart() -> None:
    payloads = [command_bytes(publication("m", str(number)), f"k{number}") for number in range(codec.BULK + 10)]
    frames = frames_of(snapshot(apply_batch(State.empty(), payloads).state))
    place = place_of(frames, codec.VERSION, codec.BULK + 5)
    record = msgspec.msgpack.decode(frames[place][1], type=VersionRecord)
    frames[place] = (codec.VERSION, encode_record(msgspec.structs.replace(record, label="3")))
    assert_refused(joined(frames), "'m/3' stands twice")


def test_nothing_is_read_ahead_of_what_the_caller_sent() -> None:
    """The reader holds at most a frame, so a stream that breaks off is noticed when it does."""

    def broken() -> Iterator[bytes]:
        yield full_image()[:-10]

    with pytest.raises(RaftmetaError) as caught:
        codec.restore(broken())
    assert "cut" in caught.value.detail


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(hs.data())
def test_any_damage_is_refused(data: hs.DataObject) -> None:
    image = full_image()
    place = data.draw(hs.integers(0, len(image) - 1))
    kind = data.draw(hs.sampled_from(["flip", "cut", "insert", "remove", "append"]))
    byte = bytes([data.draw(hs.integers(1, 255))])
    match kind:
        case "flip":
            damaged = image[:place] + bytes([image[place] ^ byte[0]]) + image[place + 1 :]
        case "cut":
            damaged = image[:place]
        case "insert":
            damaged = image[:place] + byte + image[place:]
        case "remove":
            damaged = image[:place] + image[place + 1 :]
        case _:
            damaged = image + byte
    assert_refused(damaged)


@settings(max_examples=100, deadline=None)
@given(hs.binary(max_size=200))
def test_bytes_that_are_no_snapshot_are_refused(data: bytes) -> None:
    assert_refused(data)
    assert_refused(codec.MAGIC + data)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(payload_lists(max_size=20))
def test_the_snapshot_of_any_state_restores(payloads: list[bytes]) -> None:
    state = apply_batch(State.empty(), payloads).state
    assert snapshot(codec.restore([snapshot(state)])) == snapshot(state)


def test_an_unfinished_stream_is_refused() -> None:
    image = full_image()
    for data, reason in ((b"", "cut"), (codec.MAGIC[:5], "cut"), (codec.MAGIC, "no end"), (image[:-1], "cut")):
        assert_refused(data, reason)
    assert_refused(joined(frames_of(image)[:-1]), "no end")


def test_what_follows_the_end_is_refused() -> None:
    image = full_image()
    assert_refused(image + b"x", "cut")
    assert_refused(image + codec._FRAME.pack(codec.END, 0), "expected one of b''")


def test_another_magic_is_refused() -> None:
    assert_refused(b"X" + snapshot(State.empty())[1:], "magic")


def test_a_frame_above_its_limit_is_refused_before_it_is_held() -> None:
    assert_refused(codec.MAGIC + codec._FRAME.pack(codec.HEADER, codec.MAX_FRAME_BYTES + 1), "the limit is")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": 2}, "snapshot format 2"),
        ({"hash_schema": 2}, "hash schema 2"),
        ({"scalars": msgspec.structs.replace(State.empty().scalars, feature_level=SUPPORTED_FEATURE_LEVEL + 1)}, "feature level 3"),
        ({"scalars": msgspec.structs.replace(State.empty().scalars, revision=9)}, "the state hash is"),
    ],
)
def test_a_header_of_another_build_is_refused(changes: dict[str, object], reason: str) -> None:
    assert_refused(changed(codec.HEADER, 0, codec.Header, **changes), reason)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda frames: frames.pop(0), "expected one of b'H'"),
        (lambda frames: frames.insert(1, frames[0]), "expected one of"),
        (lambda frames: frames.pop(place_of(frames, codec.MANIFEST)), "expected one of b'F'"),
        (lambda frames: frames.pop(place_of(frames, codec.MODEL, 1)), "version of model"),
        (lambda frames: frames.insert(2, frames[1]), "out of order"),
        (lambda frames: frames.insert(place_of(frames, codec.MODEL, 1), frames[place_of(frames, codec.MODEL, 1)]), "versions, expected"),
        (lambda frames: frames.append(frames.pop(place_of(frames, codec.DEPLOYMENT))), "expected one of"),
        (lambda frames: frames.insert(-1, frames[place_of(frames, codec.OUTCOME)]), "out of order"),
        (lambda frames: frames.insert(-1, (codec.OUTCOME, b"")), "cannot be read"),
        (lambda frames: frames.insert(-1, (codec.OUTCOME, b"\x02\xc3\xa9")), "no readable key"),
        (lambda frames: frames.insert(-1, (99, b"")), "expected one of"),
        (lambda frames: frames.pop(place_of(frames, codec.VERDICT)), "expected one of"),
        (lambda frames: frames.pop(place_of(frames, codec.PAST)), "frames, its end says"),
        (lambda frames: frames.pop(place_of(frames, codec.EVIDENCE)), "frames, its end says"),
        (lambda frames: frames.insert(-1, frames[place_of(frames, codec.EVIDENCE)]), "expected one of"),
        (lambda frames: frames.append((codec.END, frames.pop()[1] + b"x")), "an end of 41 bytes"),
    ],
)
def test_frames_out_of_place_are_refused(edit: Callable[[list[Frame]], object], reason: str) -> None:
    assert_refused(moved(edit), reason)


@pytest.mark.parametrize(
    ("kind", "place", "decoder", "changes", "reason"),
    [
        (codec.MODEL, 2, ModelRecord, {"name": "a"}, "out of order"),
        (codec.MODEL, 1, ModelRecord, {"version_count": 3}, "has 2 versions, expected 3"),
        (codec.MODEL, 1, ModelRecord, {"last_number": 1}, "out of order"),
        (codec.MODEL, 1, ModelRecord, {"created_ms": 1}, "the state hash is"),
        (codec.VERSION, 0, VersionRecord, {"model": "n"}, "among those of"),
        (codec.VERSION, 1, VersionRecord, {"number": 1}, "out of order"),
        (codec.VERSION, 0, VersionRecord, {"number": 0}, "out of order"),
        (codec.VERSION, 1, VersionRecord, {"label": "1"}, "stands twice"),
        (codec.VERSION, 0, VersionRecord, {"principal": "else"}, "the state hash is"),
        (codec.DEPLOYMENT, 1, Deployment, {"name": "a"}, "out of order"),
        (codec.DEPLOYMENT, 0, Deployment, {"rollout_id": "r1"}, "is not its own"),
        (codec.DEPLOYMENT, 0, Deployment, {"rollout_id": ""}, "is not its own"),
        (codec.ROLLOUT, 0, Rollout, {"deployment": "e"}, "of another deployment"),
        (codec.ROLLOUT, 1, Rollout, {"started_revision": 1}, "out of order"),
        (codec.ROLLOUT, 1, Rollout, {"id": "r1"}, "stands twice"),
        (codec.VERDICT, 0, Verdict, {"deployment": "e"}, "of another deployment"),
        (codec.VERDICT, 0, Verdict, {"verdict": "diverged"}, "the state hash is"),
        (codec.PAST, 0, VerdictHistory, {"deployment": "e"}, "verdicts of another deployment"),
        (codec.PAST, 0, VerdictHistory, {"dropped_revision": 1 << 40}, "out of order"),
        (codec.PAST, 0, VerdictHistory, {"items": ()}, "out of order"),
        (codec.PAST, 0, VerdictHistory, {"dropped_revision": 1}, "the state hash is"),
        (codec.EVIDENCE, 0, Evidence, {"deployment": "e"}, "evidence of another deployment"),
        (codec.EVIDENCE, 0, Evidence, {"node": "x1"}, "has another place"),
        (codec.EVIDENCE, 1, Evidence, {"checksum": "0" * 64}, "the state hash is"),
    ],
)
def test_records_that_contradict_are_refused(kind: int, place: int, decoder: type[Any], changes: dict[str, object], reason: str) -> None:
    assert_refused(changed(kind, place, decoder, **changes), reason)


def test_a_manifest_other_than_the_published_one_is_refused() -> None:
    def edit(frames: list[Frame]) -> None:
        frames[place_of(frames, codec.MANIFEST)] = (codec.MANIFEST, b"other")

    assert_refused(moved(edit), "not the published one")


def test_an_outcome_key_that_stands_twice_is_refused() -> None:
    def edit(frames: list[Frame]) -> None:
        payload = frames[place_of(frames, codec.OUTCOME, -1)][1]
        record = msgspec.msgpack.decode(payload[1 + payload[0] :], type=OutcomeRecord)
        later = encode_record(msgspec.structs.replace(record, revision=record.revision + 1))
        frames.insert(-1, (codec.OUTCOME, payload[: 1 + payload[0]] + later))

    assert_refused(moved(edit), "stands twice")


@pytest.mark.parametrize("tail", [b"", b"\xc0"])
def test_a_record_that_is_not_in_canonical_form_is_refused(tail: bytes) -> None:
    """Its bytes would give another hash when it is encoded again."""

    def edit(frames: list[Frame]) -> None:
        place = place_of(frames, codec.MODEL)
        payload = frames[place][1]
        assert payload[0] == 0x95  # an array of five
        wider = b"\xdc\x00\x05" + payload[1:] if not tail else b"\x96" + payload[1:] + tail
        frames[place] = (codec.MODEL, wider)

    assert_refused(moved(edit), "canonical")


def test_a_record_that_cannot_be_read_is_refused() -> None:
    def edit(frames: list[Frame]) -> None:
        frames[place_of(frames, codec.MODEL)] = (codec.MODEL, b"\x91" * 50_000)

    assert_refused(moved(edit), "cannot be read")
