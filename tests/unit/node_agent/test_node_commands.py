from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from node_agent import config as configuration
from node_agent import failure, names, report
from node_agent.device.arena import Arena, ArenaUse
from node_agent.device.control_block import ControlBlock, row_start
from node_agent.device.port import SlotRecord
from node_agent.inspect_command import look
from node_agent.ipc import Server
from node_agent.journal import DeploymentRecord, Journal
from node_agent.messages import Abort, Done, Fault, GetPlan, Json, Numbered, Reply, SetCordon, SetPin
from node_agent.plan import Order, Pinned, Target
from node_agent.slots import Switch
from raftmeta.cli.main import main
from raftmeta.core.types import SideName, StageCounters
from tests.unit.node_agent.test_arena import rewrite_header

TARGET = Target("tiny", "2.0.0", "c" * 64, "d" * 64)


class Node:
    """A node that is not running, with one deployment in its record and its memory."""

    def __init__(self, root: Path, shm: Path) -> None:
        self.store, self.shm, self.file = root / "store", shm, root / "agent.toml"
        self.store.mkdir()
        self.file.write_text(
            f'node = "n1"\nzone = "a"\nmember_urls = ["http://127.0.0.1:1"]\nstore_dir = "{self.store}"\narena_dir = "{shm}"\n'
        )
        arena = names.arena(self.store, "n1", "search")
        self.record = DeploymentRecord(
            "search", "tiny", SideName.PRIMARY, arena, names.control_block(arena), fence=Order(1, 42), obeyed=TARGET, pin=TARGET
        )
        Journal(self.store, "n1").put(self.record)
        made = Arena.create(shm / arena, 1, ArenaUse.of(self.store, "n1", "search"))
        made.mark_dirty(1, SlotRecord(version="2.0.0", checksum="c" * 64))
        made.mark_verified(1, "d" * 64, "")
        made.close()

    def serve(self, slot: int) -> None:
        block = ControlBlock.create(self.shm / self.record.control_block)
        block.attach(3)
        block.words[block_count(3, slot)] = 2
        Switch(block).switch(slot)
        block.words[block_count(3, slot)] = 2
        block.close()

    def look(self) -> dict[str, Any]:
        return look(configuration.load(self.file))


def block_count(worker: int, slot: int) -> int:
    from node_agent.device.control_block import count_index

    return count_index(worker, slot)


@pytest.fixture
def node(tmp_path: Path, shm: Path) -> Node:
    return Node(tmp_path, shm)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(["agent", *words])
    return status, capsys.readouterr().out


def test_a_stopped_node_shows_its_record_its_slots_and_its_arenas(node: Node) -> None:
    seen = node.look()
    assert seen["agent"] is None
    (deployment,) = seen["deployments"]
    assert (deployment["active"], deployment["obeyed"], deployment["pin"]) == (None, "2.0.0", "2.0.0")
    assert deployment["fence"] == {"generation": 1, "revision": 42}
    assert [(slot["state"], slot["version"]) for slot in deployment["slots"]] == [("empty", ""), ("verified", "2.0.0")]
    assert [(arena["state"], arena["deployment"]) for arena in seen["arenas"]] == [("kept", "search")]


def test_who_is_inside_a_slot_is_named(node: Node) -> None:
    node.serve(1)
    (deployment,) = node.look()["deployments"]
    assert deployment["active"] == 1
    (worker,) = deployment["workers"]
    assert (worker["worker"], worker["in_flight"]) == (3, [0, 2])


def test_the_exit_status_says_whether_everything_serves(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "inspect", "--config", str(node.file))[0] == 1
    node.serve(1)
    status, text = run(capsys, "inspect", "--config", str(node.file))
    assert status == 0
    assert "not running" in text and "1 active" in text and "2.0.0" in text and "kept" in text


def test_a_node_whose_workers_have_ended_serves_nothing(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.serve(1)
    block = ControlBlock.open(node.shm / node.record.control_block)
    block.words[row_start(3) + 1] += 1  # another process than the one that has this pid now
    block.close()
    status, text = run(capsys, "inspect", "--config", str(node.file))
    assert status == 1 and "nothing answers: no worker runs" in text
    (worker,) = node.look()["deployments"][0]["workers"]
    assert not worker["running"]


def test_a_pin_is_shown_with_its_version_and_reason(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    Journal(node.store, "n1").put(msgspec.structs.replace(node.record, pinned=Pinned(TARGET, "audit")))
    assert "pinned to 2.0.0: audit; obeys again after" in run(capsys, "inspect", "--config", str(node.file))[1]
    (deployment,) = json.loads(run(capsys, "inspect", "--json", "--config", str(node.file))[1])["deployments"]
    assert deployment["pinned"] == {
        "model": "tiny",
        "label": "2.0.0",
        "checksum": "c" * 64,
        "vector_root": "d" * 64,
        "reason": "audit",
    }


def test_looking_changes_nothing(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in (*node.shm.iterdir(), *node.store.rglob("*")) if path.is_file()}
    _, text = run(capsys, "inspect", "--json", "--config", str(node.file))
    assert json.loads(text)["node"] == "n1"
    assert {path: path.read_bytes() for path in before} == before
    assert {path for path in (*node.shm.iterdir(), *node.store.rglob("*")) if path.is_file()} == set(before)


def test_reclaim_takes_what_can_never_serve_again_and_the_rest_only_when_told(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    old = node.shm / "raftmeta-old.arena"
    Arena.create(old, 1, ArenaUse.of(node.store, "n1", "before")).close()
    rewrite_header(old, boot_id="earlier")
    kept = node.shm / node.record.arena

    status, text = run(capsys, "reclaim", "--config", str(node.file), "--json", "--dry-run")
    assert status == 0 and old.exists() and kept.exists()
    assert {row["file"]: bool(row["freed_bytes"]) for row in json.loads(text)["arenas"]} == {old.name: True, kept.name: False}

    status, text = run(capsys, "reclaim", "--config", str(node.file))
    assert status == 0 and not old.exists() and kept.exists()
    assert "freed" in text and "earlier boot" in text

    status, text = run(capsys, "reclaim", "--config", str(node.file), "--kept")
    assert status == 0 and not kept.exists()


def test_reclaim_touches_arenas_of_other_nodes_only_when_told(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, nobodys = node.shm / "raftmeta-n2.arena", node.shm / "raftmeta-n.arena"
    Arena.create(theirs, 1, ArenaUse.of(node.store / "other", "n1", "search")).close()  # the same name, another store
    Arena.create(nobodys, 1).close()
    rewrite_header(nobodys, format="raftmeta-arena-0")
    status, text = run(capsys, "reclaim", "--config", str(node.file), "--kept", "--dry-run")
    assert status == 0 and "NODE" in text and theirs.name not in text and "2 more of other nodes" in text
    assert run(capsys, "reclaim", "--config", str(node.file), "--kept")[0] == 0
    assert theirs.exists() and nobodys.exists() and not (node.shm / node.record.arena).exists()
    assert run(capsys, "reclaim", "--config", str(node.file), "--all-nodes")[0] == 0
    assert theirs.exists() and not nobodys.exists()
    assert run(capsys, "reclaim", "--config", str(node.file), "--kept", "--all-nodes")[0] == 0
    assert not theirs.exists()


def test_an_arena_that_says_of_no_node_is_this_nodes_where_its_record_names_it(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    arena = node.shm / node.record.arena
    rewrite_header(arena, format="raftmeta-arena-0")
    assert run(capsys, "reclaim", "--config", str(node.file))[0] == 0
    assert not arena.exists()


def test_reclaim_leaves_what_is_in_use(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    reader = Arena.open(node.shm / node.record.arena)
    status, text = run(capsys, "reclaim", "--config", str(node.file), "--kept", "--json")
    assert status == 0 and json.loads(text)["arenas"][0]["freed_bytes"] == 0
    reader.close()


def test_a_wrong_configuration_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "agent.toml").write_text("node = 3\n")
    assert run(capsys, "inspect", "--config", str(tmp_path / "agent.toml"))[0] == 3


def test_a_record_that_does_not_check_is_said_and_not_guessed(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    path = node.store / "node.state"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["agent", "inspect", "--config", str(node.file)]) == 1
    assert "integrity" in capsys.readouterr().err


def test_the_record_shows_a_failed_change(node: Node) -> None:
    change = msgspec.structs.replace(node.record.change, id="r1", failure=failure.make("no_headroom", "plan", "slot", "2", "1"))
    Journal(node.store, "n1").put(msgspec.structs.replace(node.record, change=change))
    assert node.look()["deployments"][0]["change"]["failure"]["kind"] == "no_headroom"


class Control:
    """A control process as the command line finds it."""

    def __init__(self, node: Node) -> None:
        self.socket = names.control_socket(node.store / "run")
        self.cordons: list[str] = []
        self.planned: list[str] = []
        self.told: list[SetPin | Abort] = []
        moved = StageCounters(bytes_read=10_000_000, bytes_from_active=999_900_000, bytes_kept=999_900_000)
        self.plans: dict[str, dict[str, Any]] = {
            "search": {
                "goal": "2.0.0",
                "rollout": "r1",
                "refused": "",
                "steps": [
                    {"step": "Fetch", "version": "3.0.0"},
                    {"step": "StageInto", "version": "3.0.0", "slot": 0, "counters": report.counters(moved)},
                    {"step": "Warm", "version": "3.0.0", "slot": 0},
                    {"step": "Attest", "version": "3.0.0", "stage": "ready"},
                ],
            }
        }

    async def answer(self, call: Numbered) -> Reply:
        if isinstance(call, SetCordon):
            self.cordons.append(call.reason)
            return Done(call.number)
        if isinstance(call, SetPin | Abort):
            self.told.append(call)
            if call.deployment != "search":
                return Fault(call.number, 404, "unknown_deployment", f"'{call.deployment}' is not on this node; it has search")
            said = {"deployment": call.deployment, "pinned": "1.0.0" if call.reason else "", "rollout": "r-7", "reason": call.reason}
            return Json(call.number, json.dumps(said).encode())
        assert isinstance(call, GetPlan)
        self.planned.append(call.version)
        return Json(call.number, json.dumps(self.plans).encode())

    @contextmanager
    def running(self) -> Iterator[None]:
        self.socket.parent.mkdir()
        loop = asyncio.new_event_loop()
        server = Server(self.answer, lambda: None)
        loop.run_until_complete(server.start(self.socket))
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


def test_a_plan_is_shown_step_by_step_with_what_it_moves(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    control = Control(node)
    with control.running():
        status, text = run(capsys, "plan", "--config", str(node.file))
        assert status == 0
        assert [line[13:28].strip() for line in text.splitlines()[1:]] == ["fetch", "stage", "warm", "attest ready"]
        assert "10.0 MB from store, 999.9 MB from active, 999.9 MB kept" in text and max(map(len, text.splitlines())) <= 100
        assert json.loads(run(capsys, "plan", "--json", "--config", str(node.file))[1]) == control.plans
        control.plans["search"]["steps"][0]["bytes_to_fetch"] = 20_000_000
        assert "20.0 MB from the sources" in run(capsys, "plan", "--dry-run", "3.0.0", "--config", str(node.file))[1]
        assert control.planned == ["", "", "3.0.0"]
        control.plans = {"search": {"goal": "", "rollout": "", "refused": "the order is older", "steps": []}}
        text = run(capsys, "plan", "--config", str(node.file))[1]
        assert text == "search: the order is older\n"
        control.plans = {"search": {"goal": "2.0.0", "rollout": "", "refused": "", "steps": []}}
        assert run(capsys, "plan", "--config", str(node.file)) == (0, "nothing left to do\n")


def test_a_dry_run_of_a_version_that_does_not_exist_is_a_usage_error(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    control = Control(node)
    refused = "9: unknown_version: model 'tiny' has no version '9'"
    control.plans = {"search": {"goal": "", "rollout": "", "refused": refused, "steps": [], "code": "unknown_version"}}
    with control.running():
        assert main(["agent", "plan", "--dry-run", "9", "--config", str(node.file)]) == 3
        captured = capsys.readouterr()
        assert captured.out == "" and "error: model 'tiny' has no version '9' (unknown_version)\nhint:  `raftmeta versions" in captured.err
        status, text = run(capsys, "plan", "--dry-run", "9", "--json", "--config", str(node.file))
        assert (status, json.loads(text)["error"]["code"]) == (3, "unknown_version")
        control.plans["other"] = {"goal": "1", "rollout": "dry run", "refused": "", "steps": [{"step": "Fetch", "version": "9"}]}
        status, text = run(capsys, "plan", "--dry-run", "9", "--config", str(node.file))
        assert status == 0 and refused in text and "fetch" in text


@pytest.mark.parametrize(
    ("refused", "steps", "said"),
    [
        ("", [{"step": "Decline", "version": "3.0.0", "pinned": "2.0.0", "reason": "audit"}], "declines 3.0.0: 2.0.0 is pinned (audit)"),
        ("the control plane was not heard yet", [], "was not heard yet"),
        ("tiny 3.0.0: integrity_mismatch: manifest of tiny/3.0.0", [], "manifest of tiny/3.0.0"),
    ],
)
def test_a_dry_run_that_the_node_would_not_take_says_no_and_why(
    node: Node, capsys: pytest.CaptureFixture[str], refused: str, steps: list[dict[str, Any]], said: str
) -> None:
    control = Control(node)
    control.plans = {"search": {"goal": "2.0.0", "rollout": "dry run", "refused": refused, "steps": steps}}
    with control.running():
        status, text = run(capsys, "plan", "--dry-run", "3.0.0", "--config", str(node.file))
        assert status == 1 and said in text and "nothing left" not in text
        assert run(capsys, "plan", "--dry-run", "3.0.0", "--json", "--config", str(node.file))[0] == 1
        assert run(capsys, "plan", "--config", str(node.file))[0] == 0


def test_a_cordon_is_set_with_its_reason_and_lifted(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    control = Control(node)
    with control.running():
        assert run(capsys, "cordon", "--config", str(node.file), "--reason", "fan replaced")[0] == 0
        assert run(capsys, "cordon", "--config", str(node.file), "--lift", "--json") == (0, '{"cordoned": false, "reason": ""}\n')
        assert run(capsys, "cordon", "--config", str(node.file), "--reason", "  ")[0] == 3
    assert control.cordons == ["fan replaced", ""]


def test_a_version_is_pinned_with_its_reason_and_lifted(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    control = Control(node)
    with control.running():
        assert run(capsys, "pin", "search", "--config", str(node.file), "--reason", "audit") == (0, "search: 1.0.0 stays, audit\n")
        assert run(capsys, "pin", "search", "--config", str(node.file), "--lift") == (0, "search: obeys again\n")
        said = json.loads(run(capsys, "pin", "search", "--config", str(node.file), "--json")[1])
        assert (said["pinned"], said["reason"]) == ("1.0.0", "by hand")
        assert run(capsys, "pin", "search", "--config", str(node.file), "--reason", " ")[0] == 3
    assert [(call.deployment, call.reason) for call in control.told] == [("search", "audit"), ("search", ""), ("search", "by hand")]


def test_a_rollout_is_aborted_with_its_reason(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    control = Control(node)
    with control.running():
        status, text = run(capsys, "abort", "search", "--config", str(node.file), "--reason", "wrong weights")
        assert (status, text) == (0, "rollout r-7 of search fails here: wrong weights\n")


@pytest.mark.parametrize("word", ["pin", "abort"])
def test_what_control_refuses_is_said_with_its_code(node: Node, capsys: pytest.CaptureFixture[str], word: str) -> None:
    with Control(node).running():
        assert main(["agent", word, "other", "--config", str(node.file)]) == 3
    assert "unknown_deployment" in (text := capsys.readouterr().err) and "it has search" in text


@pytest.mark.parametrize("words", [("plan",), ("cordon",), ("cordon", "--lift"), ("pin", "search"), ("abort", "search")])
def test_without_an_agent_there_is_nothing_to_ask_or_change(node: Node, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert main(["agent", *words, "--config", str(node.file)]) == 2
    assert "agent_unreachable" in capsys.readouterr().err
