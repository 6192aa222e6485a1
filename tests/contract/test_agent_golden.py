"""What a node promises: routes, metric names, failure classes. They stand in a golden file, and a change takes a line in the CHANGELOG.

`python -m tests.contract.test_agent_golden` writes the file anew; the difference then is what the CHANGELOG has to tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from node_agent.config import AgentConfig
from node_agent.failure import FailureClass
from node_agent.metric_table import METRICS, PHASES, PREFIX, STEPS, Kind, Spec
from node_agent.routes import ROUTES, VECTOR_QUERY, VECTORS_QUERY
from node_agent.routes import Kind as Answers
from node_agent.serve import DATATYPES
from raftmeta.security.roles import ACTIONS

GOLDEN = Path(__file__).parent / "golden" / "agent.txt"
DOCUMENTED = Path(__file__).parents[2] / "docs" / "metrics.md"
QUERIES = {Answers.VECTOR: f"?{'&'.join(VECTOR_QUERY)}", Answers.VECTORS: f"?{'&'.join(VECTORS_QUERY)}"}


def lines() -> Iterator[str]:
    yield "# routes: methods, path, action"
    for route in ROUTES:
        query = QUERIES.get(route.kind, "")
        yield f"{' '.join(route.methods)} {route.path}{query} {route.action}"
    yield "# roles that may do it"
    for action in sorted({route.action for route in ROUTES}):
        yield f"{action} {' '.join(sorted(ACTIONS[action]))}"
    yield "# failure classes of attestations"
    yield from sorted(FailureClass)
    yield "# datatypes of tensors"
    yield " ".join(["BYTES", *sorted(DATATYPES)])
    yield "# settings: field and default"
    for name, field in AgentConfig.model_fields.items():
        yield f"{name} {'-' if field.is_required() else field.default}"
    yield "# metrics: name, kind, labels, buckets"
    for spec in sorted(METRICS):
        yield " ".join((spec.full_name, spec.kind.value, ",".join(spec.labels) or "-", ",".join(map(str, spec.buckets)) or "-"))
    yield "# steps and phases in their labels"
    yield " ".join(STEPS)
    yield " ".join(PHASES)


def test_what_a_node_promises_is_what_was_promised() -> None:
    assert "\n".join(lines()) + "\n" == GOLDEN.read_text(), "see the head of this file"


def test_no_metric_is_labelled_with_a_version() -> None:
    allowed = {"deployment", "status", "worker", "outcome", "role", "index", "step", "class", "phase", "action"}
    assert {label for spec in METRICS for label in spec.labels} <= allowed


def test_the_documentation_lists_every_metric_with_its_kind_labels_and_meaning() -> None:
    rows = [line for line in DOCUMENTED.read_text("utf-8").splitlines() if line.startswith(f"| `{PREFIX}")]
    assert rows == [row(spec) for spec in sorted(METRICS)], "python -m tests.contract.test_agent_golden prints the rows"


def row(spec: Spec) -> str:
    name = spec.full_name + ("_total" if spec.kind is Kind.COUNTER else "")
    unit = next((unit for unit in ("seconds", "bytes") if spec.name.endswith(unit)), "")
    return f"| `{name}` | {spec.kind.value} | {unit} | {', '.join(spec.labels)} | {spec.help} |"


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(lines()) + "\n")
    print("\n".join(row(spec) for spec in sorted(METRICS)))
