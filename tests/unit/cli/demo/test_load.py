"""The load client keeps its schedule against a stalled server, counts every request, and sees a wrong label."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise
from typing import Any

import pytest

from raftmeta.cli.demo.load import Load, Probes, Target, judge, unit
from raftmeta.cli.demo.writer import MODEL, Writer, note
from raftmeta.client import Client
from raftmeta.core import manifest as manifests
from tests.support.stub_http import Answer, Route, problem, stub_server

V1, V2 = (0.6, 0.8), (0.8, 0.6)
PROBES = Probes(("one", "two"), {"v1": (V1, (1.0, 0.0)), "v2": (V2, (0.0, 1.0))}, tolerance=1e-3)


def body(label: str, data: Any) -> bytes:
    return json.dumps({"model_name": "search", "model_version": label, "outputs": [{"name": "embedding", "data": data}]}).encode()


def test_an_answer_of_the_weights_it_names_is_right_also_unscaled() -> None:
    assert judge("v1", body("v1", [0.6, 0.8]), 0, PROBES) == ("v1", "")
    assert judge("v2", body("v2", [8.0004, 6.0]), 0, PROBES) == ("v2", "")
    assert unit([0.0, 0.0]) == [0.0, 0.0]


def test_an_answer_nearer_to_another_version_is_wrong_even_within_tolerance() -> None:
    near = Probes(("one",), {"v1": ((0.6, 0.8),), "v2": (unit((0.6004, 0.7997)),)}, tolerance=1e-3)
    assert judge("v2", body("v2", [0.6004, 0.7997]), 0, near)[1] == ""
    assert "distances" in judge("v1", body("v1", [0.6004, 0.7997]), 0, near)[1]


@pytest.mark.parametrize(
    ("header", "content"),
    [
        ("v1", body("v1", [0.8, 0.6])),
        ("v2", body("v1", [0.6, 0.8])),
        ("v9", body("v9", [0.6, 0.8])),
        ("", body("v1", [0.6, 0.8])),
        ("v1", body("v1", [0.6])),
        ("v1", body("v1", [])),
        ("v1", body("v1", "x")),
        ("v1", body("v1", [0.62, 0.78])),
        ("v1", b'{"model_version":"v1","outputs":[]}'),
        ("v1", b"not json"),
    ],
)
def test_an_answer_of_other_weights_or_none_is_wrong(header: str, content: bytes) -> None:
    assert judge(header, content, 0, PROBES)[1]


async def drive(url: str, seconds: float, rate: float = 40.0, timeout_s: float = 5.0) -> Load:
    load = Load(Target("primary", url, "search", rate, timeout_s=timeout_s), PROBES)
    running = asyncio.create_task(load.run())
    await asyncio.sleep(seconds)
    load.stop()
    async with asyncio.timeout(20):
        await running
    return load


def answering(stall_s: float = 0.0) -> Route:
    state = {"stalled": False}

    def route(sent: Any, query: dict[str, str]) -> Answer:
        if stall_s and not state["stalled"]:
            state["stalled"] = True
            time.sleep(stall_s)
        probe = PROBES.texts.index(sent["inputs"][0]["data"][0])
        return Answer(body("v1", list(PROBES.answers["v1"][probe])), headers={"x-raftmeta-version": "v1"})

    return route


INFER = ("POST", "/v2/models/search/infer")


def test_every_request_is_answered_and_counted_once() -> None:
    with stub_server({INFER: answering()}) as stub:
        load = asyncio.run(drive(stub.url, 0.5))
    assert {sample.outcome for sample in load.samples} == {"ok"}
    assert len(load.samples) == len(stub.requests) > 5
    due = sorted(sample.scheduled_s for sample in load.samples)
    assert all(abs(b - a - 1 / 40) < 1e-6 for a, b in pairwise(due))


def test_a_stall_does_not_stop_the_schedule() -> None:
    with stub_server({INFER: answering(stall_s=0.4)}) as stub:
        load = asyncio.run(drive(stub.url, 0.5))
    first = min(load.samples, key=lambda sample: sample.scheduled_s)
    assert first.latency_s >= 0.4
    sent_meanwhile = [sample for sample in load.samples if sample.scheduled_s < first.scheduled_s + first.latency_s]
    assert len(sent_meanwhile) > 5


def test_errors_and_silence_are_lost_and_say_why() -> None:
    with stub_server({INFER: lambda sent, query: problem("overloaded")}) as stub:
        load = asyncio.run(drive(stub.url, 0.2))
    assert {sample.outcome for sample in load.samples} == {"lost"} and "503" in load.samples[0].detail
    with stub_server({INFER: answering(stall_s=1.0)}) as stub:
        load = asyncio.run(drive(stub.url, 0.1, timeout_s=0.3))
    assert "Timeout" in min(load.samples, key=lambda sample: sample.scheduled_s).detail
    load = asyncio.run(drive("http://127.0.0.1:1", 0.1))
    assert {sample.outcome for sample in load.samples} == {"lost"}


def test_what_is_due_while_too_many_are_open_is_lost_and_not_sent() -> None:
    with stub_server({INFER: answering(stall_s=0.4)}) as stub:

        async def work() -> Load:
            load = Load(Target("primary", stub.url, "search", 40.0, max_open=1), PROBES)
            running = asyncio.create_task(load.run())
            await asyncio.sleep(0.3)
            load.stop()
            await running
            return load

        load = asyncio.run(work())
        sent = len(stub.requests)
    outcomes = [sample.outcome for sample in load.samples]
    assert sent == outcomes.count("ok") == 1 and outcomes.count("lost") == len(outcomes) - 1 >= 5
    assert "1 requests were open already" in {sample.detail for sample in load.samples}


def test_the_writers_notes_are_sound_manifests_each_with_its_own_bytes() -> None:
    decoded = [manifests.Manifest(**_typed(note(label))) for label in ("w1", "w2")]
    assert [manifests.faults(item) for item in decoded] == [[], []]
    assert manifests.config_digest(decoded[0]) != manifests.config_digest(decoded[1])


def test_the_writer_names_what_was_acknowledged_and_is_gone() -> None:
    kept: dict[str, str] = {}

    def versions(sent: Any, query: dict[str, str]) -> Answer:
        labels = sorted(kept)
        page = labels[labels.index(query["after"]) + 1 :] if "after" in query else labels
        items = [{"label": label, "checksum": kept[label]} for label in page[:2]]
        return Answer({"items": items, "next": items[-1]["label"] if len(page) > 2 else None})

    def put(label: str) -> Route:
        def route(sent: Any, query: dict[str, str]) -> Answer:
            kept[label] = sent["manifest"]["files"][0]["sha256"]
            return Answer({"checksum": kept[label]}, 201)

        return route

    routes = {("PUT", f"/v1/models/{MODEL}/versions/w{number:06d}"): put(f"w{number:06d}") for number in range(100)}
    routes["GET", f"/v1/models/{MODEL}/versions"] = versions

    async def work(url: str) -> tuple[int, list[str], list[str]]:
        async with Client([url], timeout_s=2) as client:
            writer = Writer(client)
            running = asyncio.create_task(writer.run())
            assert await writer.wait_for_more(5, 10)
            writer.stop()
            await running
            complete = await writer.missing()
            del kept["w000001"]
            kept["w000003"] = "other"
            return len(writer.writes), complete, await writer.missing()

    with stub_server(routes) as stub:
        acknowledged, complete, missing = asyncio.run(work(stub.url))
    assert acknowledged >= 5 and complete == [] and missing == ["w000001", "w000003"]


def _typed(value: Any) -> dict[str, Any]:
    files = tuple(manifests.FileEntry(**file) for file in value["files"])
    return value | {"files": files, "tensors": (), "unbound": (), "sources": ()}
