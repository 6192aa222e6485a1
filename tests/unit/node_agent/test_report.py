"""What an agent says fits what the control plane takes, and metrics of several processes make one page."""

from __future__ import annotations

import msgspec

from node_agent import failure, report
from node_agent.device.port import EMPTY_RECORD, SlotRecord, SlotState
from node_agent.journal import ChangeRecord
from node_agent.plan import Attest, Target
from node_agent.report import Look, NodeFacts
from node_agent.serving import Holder, SlotLook, VectorFrom
from raftmeta import strict_json
from raftmeta.core.types import SideName, Stage, StageCounters
from raftmeta.nodes import NodeStatus

FACTS = NodeFacts("n1", "a", "boot-1", "http://n1:1")
RECORD = SlotRecord(SlotState.VERIFIED, "1.0.0", "c" * 64, vector_root="b" * 64)
LOOK = Look("search", "encoder", SideName.PRIMARY, (SlotLook(RECORD, True), SlotLook(EMPTY_RECORD, False)), True, 12, "1.0.0", "", "")
TARGET = Target("encoder", "2.0.0", "c" * 64, "d" * 64)


def test_a_heartbeat_is_what_members_take() -> None:
    status = msgspec.convert(report.heartbeat(FACTS, [LOOK]), NodeStatus)
    assert status.deployments["search"].lag_ms == 12
    assert [(slot.slot, slot.state, slot.version) for slot in status.slots] == [("active", "verified", "1.0.0"), ("standby", "empty", "")]
    nothing = report.heartbeat(FACTS, [LOOK._replace(slots=(), ready=False)])
    assert msgspec.convert(nothing, NodeStatus).deployments["search"].version == ""


def test_a_cordoned_node_is_ready_for_nothing_and_says_why() -> None:
    assert report.heartbeat(FACTS, [LOOK])["deployments"]["search"]["ready"] is True
    assert report.heartbeat(FACTS, [LOOK], "disk swap")["deployments"]["search"]["ready"] is False
    assert said(LOOK, "disk swap") == "cordoned: disk swap"
    body = report.status(FACTS, [LOOK], {}, "disk swap")
    assert (body["cordoned"], body["deployments"]["search"]["ready"]) == ("disk swap", False)


def said(look: Look, cordoned: str = "") -> str:
    """What members are told of why."""
    return msgspec.convert(report.heartbeat(FACTS, [look], cordoned), NodeStatus).deployments["search"].why


def test_members_are_told_why_a_deployment_is_not_ready_or_stays_where_it_is() -> None:
    assert said(LOOK) == ""
    assert said(LOOK._replace(trouble="no route")) == "no route"
    assert said(LOOK._replace(trouble="no route", pinned="quarter end")) == "pinned: quarter end"
    assert said(LOOK._replace(pinned="quarter end", damage="tensor w, block 3")) == "damaged: tensor w, block 3"
    assert said(LOOK._replace(trouble="\u20ac" * 2000)) == "\u20ac" * (256 // 3), "as bytes: many deployments share a heartbeat"
    spoilt = report.heartbeat(FACTS, [LOOK._replace(trouble="file \udcff is away")])
    assert b"file ? is away" in strict_json.dumps(spoilt), "a name that is no text keeps no heartbeat from being sent"


def test_a_status_adds_what_stands_in_the_way() -> None:
    lost = {"reachable": False, "reason": "no_quorum", "silent_s": 3.25}
    body = report.status(FACTS, [LOOK._replace(trouble="no route")], lost)
    assert body["control_plane"] == lost
    assert body["deployments"]["search"]["trouble"] == "no route"
    assert (body["deployments"]["search"]["holders"], body["deployments"]["search"]["vector_from"]) == ([], "memory")
    held = LOOK._replace(holders=(Holder("worker 1", 12.34), Holder("the server", None)), vector_from=VectorFrom.SERVER)
    shown = report.status(FACTS, [held], lost)["deployments"]["search"]
    assert shown["holders"] == [{"who": "worker 1", "seconds": 12.3}, {"who": "the server", "seconds": None}]
    assert shown["vector_from"] == "server"
    assert body["deployments"]["search"]["version"] == "1.0.0"


def test_prepared_names_no_root_and_ready_names_the_one_from_memory() -> None:
    change = ChangeRecord("r-1", StageCounters(bytes_total=7))
    prepared = report.attestation(Attest("r-1", Stage.PREPARED, TARGET), SideName.PRIMARY, "boot-1", "d" * 64, change)
    ready = report.attestation(Attest("r-1", Stage.READY, TARGET), SideName.PRIMARY, "boot-1", "d" * 64, change)
    assert (prepared["vector_root"], ready["vector_root"]) == ("", "d" * 64)
    assert ready["counters"]["bytes_total"] == 7
    assert (ready["code"], ready["detail"]) == ("", "")


def test_only_a_failure_carries_code_and_a_bounded_detail() -> None:
    change = ChangeRecord("r-1", StageCounters(), failure.make("no_headroom", "plan", "x" * 5000, "y" * 5000, "z"))
    failed = report.attestation(Attest("r-1", Stage.FAILED, TARGET), SideName.STANDBY, "boot-1", "d" * 64, change)
    assert (failed["code"], len(failed["detail"]), failed["vector_root"]) == ("resource_exhausted", 1000, "")
