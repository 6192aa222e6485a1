"""A serving node without workers: `python -m benchmarks.check_node NODE ZONE MEMBER_URL ROOT ARENA_DIR`.

Front, its HTTP listener, control with its loop, store, arenas, journal and answers are the agent's own, wired as `control.run` and the
front process wire them, in one process and over the same socket. What is left out is whoever would compute: no module is bound, and a
prober that says yes stands in the crew. There is no scrub either. For the check that is all there is, since it reads memory and asks nobody
else.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import cast

import httpx

from node_agent import http_server
from node_agent.budget import DEFAULT_SHARE, Budget, memory_speed
from node_agent.config import AgentConfig
from node_agent.control import PLANE_TIMEOUT_S, Answers, ClientPlane
from node_agent.crew import Crew
from node_agent.desired import Desired, Identity
from node_agent.engine import known
from node_agent.fetch import Fetcher, Patience
from node_agent.in_process import InProcess
from node_agent.ipc import Server
from node_agent.journal import DeploymentRecord, Journal
from node_agent.loop import Bounds, ControlPlane, Loop
from node_agent.messages import Proved
from node_agent.observe import Observer
from node_agent.page_cache import DropBehind
from node_agent.peers import Peer
from node_agent.places import Places
from node_agent.plan import Target
from node_agent.provide import StoreProvider
from node_agent.report import NodeFacts
from node_agent.runtime import Runtime, end_with_parent, start_log
from node_agent.s3_source import Buckets
from node_agent.sources import opener
from node_agent.station import Station
from node_agent.store import Store
from node_agent.taking import Means
from raftmeta.client import Client


class NobodyComputes(Crew):
    async def prove(self, deployment: str, slot: int, target: Target) -> Proved:
        return Proved(0, {}, 0, 0, ())


async def run(config: AgentConfig, listener: socket.socket) -> None:
    """Until SIGTERM."""
    runtime = Runtime(config, f"boot-{config.node}", listener.getsockname()[1])
    runtime.listen_for_stop()
    runtime.run_dir.mkdir(parents=True, exist_ok=True)
    facts = NodeFacts(config.node, config.zone, runtime.boot_id, runtime.url)
    store = Store(config.store_dir, config.store_quota_bytes, close=DropBehind())
    places = Places(
        store,
        Journal(config.store_dir, config.node),
        config.arena_dir,
        config.slot_bytes,
        stage_threads=config.stage_threads,
        budget=Budget(DEFAULT_SHARE * memory_speed()),
        verify_max_age_ns=round(config.verify_max_age_s * 1e9),
    )
    crew = NobodyComputes([], Peer(runtime.prober_socket(), lambda: None), config.load_timeout_s)
    async with Client(config.member_urls, timeout_s=PLANE_TIMEOUT_S) as client:
        plane = cast(ControlPlane, ClientPlane(client))
        bounds = Bounds(config.max_deployments, config.start_wait_s)
        loop = Loop(facts, Desired(Identity(config.node, runtime.boot_id)), places, plane, bounds)
        with httpx.Client(timeout=config.fetch_timeout_s, trust_env=False) as http:
            fetcher = Fetcher(store, opener(config.artifact_roots, http, Buckets(config.s3).source), Patience(config.fetch_attempts))
            provider = StoreProvider(store, fetcher, plane, loop.keep, known.chosen(config.engines))
            meter = runtime.meter("control")

            def serve(record: DeploymentRecord) -> InProcess:
                return InProcess(Station(record, places), crew, "kernel")

            means = Means(config.node, runtime.boot_id, plane, provider, serve, Observer(meter))
            server = Server(Answers(loop, facts, store, meter).answer, lambda: None)
            await server.start(runtime.control_socket())
            following = asyncio.create_task(loop.run(means))
            await http_server.run(runtime, listener)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await server.stop()


def main(arguments: list[str]) -> None:
    node, zone, member_url, root, arena_dir, parent = arguments
    end_with_parent(int(parent))
    config = AgentConfig(
        node=node,
        zone=zone,
        member_urls=(member_url,),
        listen="127.0.0.1:0",
        store_dir=Path(root) / node,
        run_dir=Path(root) / f"{node}-run",
        arena_dir=Path(arena_dir),
        artifact_roots=(Path(root) / "artifacts",),
        max_deployments=64,
        log_level="warning",
        drain_s=0,
    )
    start_log("benchmark", config)
    asyncio.run(run(config, socket.create_server(("127.0.0.1", 0))))


if __name__ == "__main__":
    main(sys.argv[1:])
