"""Where things of a node lie and how much of it its deployments may take, shared by all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from node_agent import names
from node_agent.budget import Budget
from node_agent.journal import DeploymentRecord, Journal
from node_agent.plan import Goal
from node_agent.store import Store


@dataclass(frozen=True)
class Places:
    """Where things of this node lie, shared by its deployments."""

    store: Store
    journal: Journal
    arena_dir: Path
    slot_bytes: int  # 0: the first version and a quarter more
    stage_threads: int = 1
    budget: Budget | None = None  # of whatever moves bytes beside requests
    workers: int = 1  # that bind a module of a staged version; the prober does too, before them
    activation_bytes: int = 0  # that one of them takes beside the arena; 0: what the prober saw of the last version
    numa_nodes: tuple[int, ...] = ()  # where an arena should lie
    verify_max_age_ns: int = 0  # a tensor whose vector was computed so lately is not read again when it stays where it is
    clock_ns: Callable[[], int] = time.monotonic_ns
    wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000  # only shown, never compared


def new_record(goal: Goal, model: str, store_dir: Path, node: str) -> DeploymentRecord:
    """What is remembered of a deployment from the moment it lists this node."""
    arena = names.arena(store_dir, node, goal.deployment)
    return DeploymentRecord(goal.deployment, model, goal.side, arena, names.control_block(arena))
