"""What a node promises: routes, metric names, failure classes. They stand in a golden file, and a change takes a line in the CHANGELOG.

`python -m tests.contract.test_agent_golden` writes the file anew; the difference then is what the CHANGELOG has to tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from node_agent.config import AgentConfig
from node_agent.control import Answers
from node_agent.failure import FailureClass
from node_agent.front import Front
from node_agent.messages import Family
from node_agent.report import NodeFacts
from node_agent.routes import ROUTES, VECTOR_QUERY, Kind
from node_agent.runtime import Runtime
from node_agent.serve import DATATYPES
from node_agent.worker import Worker
from raftmeta.security.roles import ACTIONS

GOLDEN = Path(__file__).parent / "golden" / "agent.txt"


def lines() -> Iterator[str]:
    yield "# routes: methods, path, action"
    for row in ROUTES:
        query = f"?{'&'.join(VECTOR_QUERY)}" if row.kind is Kind.VECTOR else ""
        yield f"{' '.join(row.methods)} {row.path}{query} {row.action}"
    yield "# roles that may do it"
    for action in sorted({row.action for row in ROUTES}):
        yield f"{action} {' '.join(sorted(ACTIONS[action]))}"
    yield "# failure classes of attestations"
    yield from sorted(FailureClass)
    yield "# datatypes of tensors"
    yield " ".join(["BYTES", *sorted(DATATYPES)])
    yield "# settings: field and default"
    for name, field in AgentConfig.model_fields.items():
        yield f"{name} {'-' if field.is_required() else field.default}"
    yield "# metrics: name, type, labels of a process"
    yield from sorted(_metrics())


def _metrics() -> Iterator[str]:
    config = AgentConfig(node="n1", zone="a", member_urls=("http://127.0.0.1:1",), store_dir=Path("/nonexistent"))
    nothing: Any = None
    meters = [
        Front(Runtime(config, "boot", 1))._meter,
        Answers(nothing, NodeFacts("n1", "a", "boot", ""), nothing)._meter,
        Worker(0, nothing)._meter,
    ]
    for meter in meters:
        for family in meter.families():
            yield f"{family.name} {family.kind} {' '.join(_labels(meter, family)) or '-'}"


def _labels(meter: Any, family: Family) -> list[str]:
    """Label names of a family, which has no samples before the first count."""
    found = meter._registry._names_to_collectors.get(family.name) or meter._registry._names_to_collectors[f"{family.name}_total"]
    return list(found._labelnames)


def test_what_a_node_promises_is_what_was_promised() -> None:
    assert "\n".join(lines()) + "\n" == GOLDEN.read_text(), "see the head of this file"


def test_no_metric_is_labelled_with_a_version() -> None:
    allowed = {"deployment", "status", "worker", "outcome", "role", "index", "-"}
    for line in _metrics():
        assert set(line.split()[2:]) <= allowed, line


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(lines()) + "\n")
