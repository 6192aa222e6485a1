"""The table of operations: what the API can do, one row each."""

from __future__ import annotations

from api.operation import Operation
from api.routes import cluster, deployments, evidence, failovers, models, nodes, process, rollouts, verdicts, versions, watch

OPERATIONS: tuple[Operation, ...] = (
    *models.OPERATIONS,
    *versions.OPERATIONS,
    *deployments.OPERATIONS,
    *rollouts.OPERATIONS,
    *nodes.OPERATIONS,
    *evidence.OPERATIONS,
    *failovers.OPERATIONS,
    *cluster.OPERATIONS,
    *verdicts.OPERATIONS,
    *watch.OPERATIONS,
    *process.OPERATIONS,
)
