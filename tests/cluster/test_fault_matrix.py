"""Some rows of the table of faults (`python -m tests.cluster.fault_matrix` makes all), and versions and orders that are refused."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file

from consistency.artifact import build_manifest
from raftmeta.client import Client
from raftmeta.core.errors import RaftmetaError
from tests.cluster.fault_matrix import FAULTS, PHASES, Matrix, expected, matrix

pytestmark = pytest.mark.cluster

ROWS = (("fetch", "full arena"), ("fill", "kill control"), ("bind", "kill worker"), ("switch", "kill control"))


@pytest.fixture(scope="module")
def node() -> Iterator[Matrix]:
    try:
        with matrix() as made:
            yield made
    except OSError as cause:
        pytest.skip(f"small file systems cannot be mounted here: {cause}")


@pytest.mark.parametrize(("phase", "fault"), ROWS, ids=" ".join)
def test_a_fault_at_a_phase_of_an_update_ends_as_the_table_says(node: Matrix, phase: str, fault: str) -> None:
    row = node.run(phase, fault)
    assert not row.bad, row


def test_every_pair_of_phase_and_fault_has_an_expectation_or_a_reason() -> None:
    for phase in PHASES:
        for fault in FAULTS:
            cell = expected(phase, fault)
            assert cell.ends or cell.impossible, (phase, fault)


def publish(node: Matrix, label: str, directory: Path, unbound: tuple[str, ...] = ()) -> None:
    manifest = build_manifest(directory, sources=[node.source.url_of(directory)], engine="hf", unbound=unbound)
    node.driver.publish(label, manifest)


def changed(node: Matrix, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """The base version with other weights."""
    directory = node.artifacts / name
    shutil.copytree(node.artifacts / "v1", directory)
    weights = directory / "model.safetensors"
    save_file(change(load_file(weights)), weights)
    return directory


def of_a_smaller_size(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: value[:, :16].contiguous() if value.ndim == 2 else value for name, value in weights.items()}


def of_a_size_that_no_slot_has(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.nn.functional.pad(value, (0, 32)) if value.ndim == 2 else value for name, value in weights.items()}


def without_a_tensor(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in weights.items() if name != "encoder.layer.0.output.dense.weight"}


def with_another_dtype(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: value.half() if name == "encoder.layer.0.output.dense.weight" else value for name, value in weights.items()}


def with_a_stranger(weights: dict[str, Any]) -> dict[str, Any]:
    return weights | {"encoder.layer.7.output.dense.weight": torch.ones(4, 4)}


def with_a_value_that_is_no_number(weights: dict[str, Any]) -> dict[str, Any]:
    return weights | {"encoder.layer.1.output.dense.bias": torch.full_like(weights["encoder.layer.1.output.dense.bias"], float("nan"))}


UNUSABLE = {
    of_a_smaller_size: "incompatible_layout",
    of_a_size_that_no_slot_has: "resource_exhausted",
    without_a_tensor: "incompatible_layout",
    with_another_dtype: "incompatible_layout",
    with_a_stranger: "incompatible_layout",
    with_a_value_that_is_no_number: "warmup_failed",
}


@pytest.mark.parametrize("change", UNUSABLE, ids=lambda change: change.__name__)
def test_a_version_that_cannot_answer_is_refused_by_its_class_and_what_serves_is_untouched(node: Matrix, change: Any) -> None:
    node.be_at_rest()
    before = node.agent.get("/raftmeta/v1/vector/search").json()
    label = f"{90 + list(UNUSABLE).index(change)}.0.0"
    publish(node, label, changed(node, change.__name__, change))
    rollout = node.driver.activate(label)
    assert (rollout["status"], rollout["failure"]["code"]) == ("failed", UNUSABLE[change]), rollout
    after = node.agent.get("/raftmeta/v1/vector/search").json()
    assert [after[key] for key in ("version", "vector_root", "slot", "epoch")] == [
        before[key] for key in ("version", "vector_root", "slot", "epoch")
    ]
    node.agent.until_ready()


def test_of_fifty_activations_at_once_one_is_done_and_every_other_names_it(node: Matrix) -> None:
    node.be_at_rest()
    labels = [node.new_version() for _ in range(5)]
    staged = node.agent.log.count('"event": "staged"')

    async def all_at_once(client: Client) -> list[Any]:
        return await asyncio.gather(*(client.activate("search", labels[n % 5]) for n in range(50)), return_exceptions=True)

    replies = node.driver.call(all_at_once)
    done = [reply["rollout_id"] for reply in replies if not isinstance(reply, BaseException)]
    refused = [reply for reply in replies if isinstance(reply, BaseException)]
    assert len(done) == 1
    assert all(isinstance(fault, RaftmetaError) and fault.code == "rollout_in_progress" and done[0] in str(fault) for fault in refused), (
        refused
    )
    assert node.driver.finish(done[0])["status"] == "done"
    node.agent.until_settled(node.driver.serving)
    assert node.agent.log.count('"event": "staged"') == staged + 1
