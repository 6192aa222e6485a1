"""Questions for the memory of deployments that leave the node while they are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node_agent.messages import Fault, GetVector
from tests.support.tending import TendScene, run
from tests.unit.node_agent.test_vector_answers import Node


@pytest.fixture
def node(tmp_path: Path, shm: Path) -> Iterator[Node]:
    made = Node(TendScene(tmp_path, shm))
    yield made
    made.scene.close()


@pytest.mark.parametrize("how", ["as it should", "from memory that was closed"])
def test_a_deployment_that_leaves_while_it_is_read_is_a_fault_in_its_own_place(node: Node, how: str) -> None:
    async def work() -> None:
        await node.scene.roll(None, 1)
        node.tenders["other"] = tender = node.scene.tender
        vector = node.scene.station.vector

        def leaving(tensor: str = "") -> Any:
            found = vector(tensor)
            if node.tenders.pop("other", None) is not None and how != "as it should":
                raise ValueError("operation forbidden on released memoryview object")
            return found

        node.scene.station.vector = leaving  # type: ignore[method-assign]
        body = await node.all("other", "search")
        assert (set(body["vectors"]), body["faults"]["other"]["code"]) == ({"search"}, "unknown_deployment")
        for call in (GetVector(1, "other", False, ""), GetVector(1, "other", False, "a")):
            node.tenders["other"] = tender
            reply = await node.reply(call)
            assert isinstance(reply, Fault) and (reply.status, reply.code) == (404, "unknown_deployment")

    run(work)


def test_a_deployment_that_leaves_while_the_next_one_is_read_keeps_nobody_from_the_answer(node: Node) -> None:
    async def work() -> None:
        await node.scene.roll(None, 1)
        node.tenders["alpha"] = node.scene.tender
        node.count_reads()
        vector = node.scene.station.vector

        def first_leaves_while_the_second_is_read(tensor: str = "") -> Any:
            if node.reads():
                node.tenders.pop("alpha")
            return vector(tensor)

        node.scene.station.vector = first_leaves_while_the_second_is_read  # type: ignore[method-assign]
        body = await node.all("alpha", "search")
        assert (set(body["vectors"]), set(body["faults"])) == ({"search"}, {"alpha"})
        assert body["faults"]["alpha"]["code"] == "unknown_deployment"

    run(work)
