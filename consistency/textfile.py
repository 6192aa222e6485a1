"""Verdicts as a page for the textfile collector of Prometheus' node exporter. Pure.

Names are promises. Whoever alarms needs three of them: `raftmeta_check_exit_status` is not 0, `raftmeta_check_completed_timestamp_seconds`
grows old because the check is not run any more, and `raftmeta_check_memory_age_seconds` says how old the oldest reading is that a verdict
rests on. A figure that is not known is left out, never 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from consistency.findings import EXIT_STATUS, Verdict

PREFIX = "raftmeta_check_"


class Metric(NamedTuple):
    name: str  # without the prefix
    labels: str
    help: str


METRICS = (
    Metric(
        "verdict", "deployment, verdict", "The verdict of the last check of a deployment: 1 for the one that was given, 0 for the others"
    ),
    Metric("findings", "deployment", "Differences beyond their limit"),
    Metric("not_looked_at", "deployment", "What could not be looked at and keeps the verdict from being consistent"),
    Metric("nodes", "deployment", "Nodes of the deployment"),
    Metric("nodes_seen", "deployment", "Nodes whose memory was seen"),
    Metric("mismatch_ratio", "deployment", "Share of the manifest's tensors that differ on some node"),
    Metric("memory_age_seconds", "deployment", "Since the oldest reading of a node's memory began, when the verdict was given"),
    Metric("duration_seconds", "", "How long the last check took"),
    Metric("completed_timestamp_seconds", "", "When the last check ended"),
    Metric("exit_status", "", "Exit status of the last check: 0 consistent, 1 diverged, 2 incomplete"),
    Metric("not_recorded", "", "Verdicts of the last check that the members did not take"),
)


class Run(NamedTuple):
    """What is true of the whole check."""

    exit_status: int
    duration_s: float
    completed_ms: int
    not_recorded: int


def page(verdicts: Sequence[Verdict], run: Run) -> bytes:
    whole = {
        "duration_seconds": f"{run.duration_s:.3f}",
        "completed_timestamp_seconds": f"{run.completed_ms / 1000:.3f}",
        "exit_status": str(run.exit_status),
        "not_recorded": str(run.not_recorded),
    }
    lines: list[str] = []
    for metric in METRICS:
        rows = [f" {whole[metric.name]}"] if metric.name in whole else [row for each in verdicts for row in _rows(metric.name, each)]
        if rows:
            name = PREFIX + metric.name
            lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} gauge", *(name + row for row in rows)]
    return ("\n".join(lines) + "\n").encode()


def _rows(name: str, verdict: Verdict) -> Iterator[str]:
    """Labels and value."""
    deployment = f'deployment="{_escaped(verdict.deployment)}"'
    if name == "verdict":
        for word in sorted(EXIT_STATUS):
            yield f'{{{deployment},verdict="{word}"}} {int(word == verdict.verdict)}'
        return
    values: dict[str, float | None] = {
        "findings": verdict.findings_total,
        "not_looked_at": len(verdict.reasons),
        "nodes": verdict.nodes_total,
        "nodes_seen": verdict.nodes_seen,
        "mismatch_ratio": verdict.mismatch_ratio,
        "memory_age_seconds": None if verdict.oldest_proof_ms is None else verdict.oldest_proof_ms / 1000,
    }
    value = values[name]
    if value is not None:
        yield f"{{{deployment}}} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
