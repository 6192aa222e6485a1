"""What `raftmeta live` records: a difference is of the order under which it was found, once, and while it is young."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from consistency.inference import Output
from consistency.live import Heard, Ledger, Moment, Order, Question, judge
from consistency.live_command import MAX_SHARE_RATE, RECORD_S, LiveOptions, _Session, order_of, rate_of
from consistency.live_report import Ran
from raftmeta.cli import output
from raftmeta.client import Client, Reply
from raftmeta.core.errors import RaftmetaError

FOUND = Order(1, 11, "1.0.0", 20)
QUESTION = Question("q", b"{}", 1, "close")


@dataclass
class Members:
    taken: list[dict[str, Any]] = field(default_factory=list)
    fault: RaftmetaError | None = None

    async def record_verdict(self, deployment: str, verdict: str, report: Mapping[str, Any], *, basis: Mapping[str, Any]) -> None:
        if self.fault is not None:
            raise self.fault
        self.taken.append({"verdict": verdict, "kept": len(report["kept"])} | dict(basis))


@dataclass
class Scene:
    members: Members = field(default_factory=Members)
    ledger: Ledger = field(default_factory=lambda: Ledger({"primary": ["p"], "standby": ["s"]}))

    def __post_init__(self) -> None:
        progress = output.Progress(quiet=True)
        self.session = _Session(LiveOptions(deployment="search"), cast(Client, self.members), cast(Any, None), cast(Any, None), progress)
        self.session.ran = lambda: Ran("search", "tiny", 1.0, 1.0, 0.0, 0, 0, 0.9, self.ledger, tuple(self.session.actions))

    def differs(self, order: Order | None = FOUND, age_s: float = 0.0, version: str = "1.0.0") -> None:
        first, second = (Heard(node, version, {}, (Output("y", "FP32", (1,), np.full(1, at)),)) for at, node in enumerate("ps", 1))
        moment = Moment(time.monotonic(), time.time_ns() // 1_000_000 - round(age_s * 1000), order)
        assert self.ledger.add(QUESTION, first, second, judge(QUESTION, first, second, ("F32",)), moment)

    def record(self) -> list[dict[str, Any]]:
        asyncio.run(self.session._record())
        return self.members.taken


def test_a_difference_is_recorded_of_the_order_that_was_known_when_it_was_asked() -> None:
    scene = Scene()
    scene.differs(age_s=7)
    expected = {"generation": 1, "order_revision": 11, "version": "1.0.0", "started_revision": 20, "node_count": 2}
    (taken,) = scene.record()
    assert 7_000 <= taken.pop("age_ms") < 60_000
    assert taken == {"verdict": "diverged", "kept": 1} | expected
    assert scene.session.recorded is scene.ledger.kept[-1] and scene.session.record_at > time.monotonic() + RECORD_S - 5


@pytest.mark.parametrize(
    ("order", "version", "says"),
    [
        (None, "1.0.0", "not known what was ordered"),
        (FOUND._replace(in_flight=True), "1.0.0", "being switched to"),
        (FOUND._replace(version="2.0.0"), "1.0.0", "2.0.0 was being switched to"),
    ],
)
def test_a_difference_under_no_order_that_holds_is_not_recorded(order: Order | None, version: str, says: str) -> None:
    scene = Scene()
    scene.differs(order, version=version)
    assert not scene.record() and says in scene.session.actions[-1]


def test_a_difference_that_is_old_is_not_recorded_as_if_it_were_of_now() -> None:
    scene = Scene()
    scene.differs(age_s=RECORD_S + 60)
    assert not scene.record() and "360 s old" in scene.session.actions[-1]


def test_what_nodes_call_their_outputs_cannot_command_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    scene = Scene()
    scene.session.progress = output.Progress(quiet=False)
    scene.differs()
    kept = scene.ledger.kept[-1]
    judged = kept.judgement._replace(detail="output \x1b]0;owned\x07\x1b[2J")
    scene.session.options = LiveOptions(deployment="search", look=False)
    asyncio.run(scene.session._act(QUESTION, kept.primary, kept.standby, judged))
    told = capsys.readouterr().err
    assert "owned" in told and "\x1b" not in told and "\x07" not in told


def test_what_members_refuse_is_said_and_the_next_difference_is_offered_soon() -> None:
    scene = Scene(Members(fault=RaftmetaError("verdict_outdated", "as the test says")))
    scene.differs()
    assert not scene.record() and "verdict_outdated" in scene.session.actions[-1]
    assert scene.session.record_at < time.monotonic() + RECORD_S / 2


def test_what_is_ordered_is_read_with_the_revision_that_says_so() -> None:
    side = {"zone": "a", "nodes": ["p"]}
    body = {"name": "search", "model": "tiny", "primary": side, "standby": side, "version": "1.0.0", "previous": "", "rollout_id": ""}
    seen = Reply(body | {"order_revision": 11, "activated_revision": 12}, status=200, revision=20, generation=1)
    assert order_of(seen) == FOUND and not order_of(seen).in_flight
    assert order_of(Reply(seen | {"activated_revision": 10}, status=200, revision=20, generation=1)).in_flight


def test_no_word_of_nodes_on_what_they_can_compute_makes_a_flood() -> None:
    assert rate_of(LiveOptions(deployment="d"), 1e9, 8) == MAX_SHARE_RATE
    assert rate_of(LiveOptions(deployment="d"), 100.0, 8) == pytest.approx(16.0) and rate_of(LiveOptions(deployment="d"), 0.0, 8) == 0.01
    assert rate_of(LiveOptions(deployment="d", rate=5000.0), 1e9, 8) == 5000.0
