"""The control process: wiring of everything that decides and moves bytes, and its answers to the front.

Only this process writes to the arena, the node's record and the store. It serves no request, so it may be killed at any moment: the workers
go on with what is active, and its successor takes over from the record, the arena and the store.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, cast

import httpx
import msgspec

from consistency.vector import backend
from node_agent import metric_table as table
from node_agent import tasks
from node_agent.active_memory import ActiveMemory
from node_agent.budget import DEFAULT_SHARE, Budget, memory_speed
from node_agent.crew import Crew
from node_agent.desired import Desired, Identity
from node_agent.device import inventory
from node_agent.device.port import SlotRecord
from node_agent.engine import known
from node_agent.fetch import Fetcher, Patience
from node_agent.in_process import InProcess
from node_agent.ipc import Server
from node_agent.journal import DeploymentRecord, Journal
from node_agent.loop import Bounds, ControlPlane, Loop
from node_agent.mending import Mender
from node_agent.messages import (
    Abort,
    Done,
    Fault,
    GetDigests,
    GetEvidence,
    GetMetrics,
    GetPlan,
    GetStatus,
    GetVector,
    GetVectors,
    Json,
    Metrics,
    Numbered,
    Reply,
    SetCordon,
    SetPin,
)
from node_agent.metrics import Meter, totals
from node_agent.observe import Observer
from node_agent.page_cache import DropBehind
from node_agent.peers import Peer
from node_agent.places import Places
from node_agent.provide import StoreProvider
from node_agent.proving import kernel
from node_agent.quiet import Gate
from node_agent.report import NodeFacts
from node_agent.runtime import Runtime, log
from node_agent.s3_source import Buckets
from node_agent.scrubbing import Scrub, ScrubMeans, idle_thread
from node_agent.serving import Evidence
from node_agent.sources import opener
from node_agent.station import Station
from node_agent.store import Store
from node_agent.taking import Means
from node_agent.tend import Tender
from node_agent.vector_answers import VectorAnswers
from raftmeta.client import Client, all_items
from raftmeta.core.errors import RaftmetaError

HEARTBEAT_TIMEOUT_S = 5.0
PLANE_TIMEOUT_S = 30.0


class ClientPlane:
    """The client SDK as the agent uses it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.cluster = client.cluster
        self.get_rollout = client.get_rollout
        self.get_version = client.get_version
        self.get_manifest = client.get_manifest
        self.attest = client.attest
        self.record_evidence = client.record_evidence
        self.watch = client.watch

    def deployments(self) -> AsyncIterator[Mapping[str, Any]]:
        return all_items(self._client.list_deployments)

    async def heartbeat(self, node: str, status: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self._client.heartbeat(node, status, timeout_s=HEARTBEAT_TIMEOUT_S)


class Answers:
    """What control answers to the front."""

    def __init__(self, loop: Loop, facts: NodeFacts, store: Store, meter: Meter) -> None:
        self._loop = loop
        self._facts = facts
        self._store = store
        self._meter = meter
        self._vectors = VectorAnswers(loop, facts, store)

    async def answer(self, call: Numbered) -> Reply:
        match call:
            case GetStatus():
                return Json(call.number, msgspec.json.encode(self._loop.status()))
            case GetVector() | GetVectors() | GetDigests():
                return await self._vectors.answer(call)
            case GetEvidence():
                return await self._evidence(call)
            case GetPlan():
                return Json(call.number, msgspec.json.encode(await self._loop.plans(call.version)))
            case SetCordon():
                await asyncio.to_thread(self._loop.cordon, call.reason)
                return Done(call.number)
            case SetPin():
                return await _said(call.number, self._loop.pin(call.deployment, call.reason))
            case Abort():
                return await _said(call.number, self._loop.abort(call.deployment, call.reason))
            case GetMetrics():
                await self._measure()
                return Metrics(call.number, self._meter.gauges())
            case _:
                return Fault(call.number, 400, "bad_request", f"control does not answer {type(call).__name__}")

    async def _evidence(self, call: GetEvidence) -> Reply:
        tender = self._loop.tenders.get(call.deployment)
        if tender is None:
            return Fault(call.number, 404, "unknown_deployment", f"deployment {call.deployment!r} is not on this node")
        found = tender.serving.evidence()
        if found is None:
            return Fault(call.number, 503, "starting", f"{call.deployment}: nothing serves yet that this process has verified")
        try:
            return Json(call.number, await asyncio.to_thread(self._evidence_body, tender, found))
        except RaftmetaError as error:  # it left meanwhile
            return Fault(call.number, error.info.status, error.code, error.detail)

    def _evidence_body(self, tender: Tender, found: Evidence) -> bytes:
        record, manifest = tender.remembered.record, self._store.manifest(found.record.checksum)
        proof = next((each for each in record.proofs if each.checksum == found.record.checksum), None)
        beside = () if manifest is None else [file for file in manifest.files if file.role != "weights"]
        digests = self._store.beside.digests(found.record.checksum)
        body: dict[str, Any] = {
            **self._facts._asdict(),
            "deployment": record.name,
            "model": record.model,
            "side": record.side.value,
            "version": found.record.version,
            "checksum": found.record.checksum,
            "order": record.fence._asdict(),
            "applied": _applied(self._loop.cluster_id, record, found.record),
            "slot": found.slot,
            "epoch": found.epoch,
            "vector_root": found.record.vector_root,
            "vector_from": found.vector_from.value,
            "verified_at_ms": found.verified_at_ms,
            "verified_age_ms": found.verified_age_ms,
            "finding": found.finding,
            "damage": record.damage,
            "derived": found.derived,
            "config_digest": "" if digests is None else digests.config,
            "files": [{"name": file.name, "role": file.role, "sha256": file.sha256} for file in beside],
            "probed": None if proof is None else {"kernel": proof.kernel, "warm_ms": proof.warm_ms, "measured": proof.measured},
        }
        return msgspec.json.encode(body)

    async def _measure(self) -> None:
        gauge = self._meter.set
        gauge(table.REACHABLE, self._loop.contact.reachable)
        gauge(table.CORDONED, self._loop.is_cordoned)
        gauge(table.SILENT_SECONDS, self._loop.contact.silent_s)
        gauge(table.STORE_BYTES, await asyncio.to_thread(self._store.used_bytes))
        self._meter.clear(table.VERIFIED, table.DEPLOYMENT_READY, table.LAG_SECONDS, table.TROUBLE, table.PINNED)
        self._meter.clear(table.VERIFIED_AGE, table.DAMAGED)
        for name, tender in self._loop.tenders.items():
            look = tender.look()
            gauge(table.VERIFIED, sum(slot.record.state == "verified" for slot in look.slots), name)
            gauge(table.DEPLOYMENT_READY, look.ready, name)
            gauge(table.LAG_SECONDS, look.lag_ms / 1000 if look.lag_ms >= 0 else -1, name)
            gauge(table.TROUBLE, bool(look.trouble), name)
            gauge(table.PINNED, bool(look.pinned), name)
            gauge(table.DAMAGED, bool(look.damage), name)
            known = tender.serving.evidence()
            gauge(table.VERIFIED_AGE, -1 if known is None else max(0.0, time.time() - known.verified_at_ms / 1000), name)


def _applied(cluster_id: str, record: DeploymentRecord, serving: SlotRecord) -> dict[str, tuple[int, int]]:
    """By control plane the last order obeyed; none while it named another version than serves: in the middle of a switch, or pinned."""
    obeyed = record.obeyed
    if obeyed is None or (obeyed.label, obeyed.checksum) != (serving.version, serving.checksum):
        return {}
    return {cluster_id: record.fence}


async def _said(number: int, work: Awaitable[Mapping[str, Any]]) -> Reply:
    try:
        return Json(number, msgspec.json.encode(await work))
    except RaftmetaError as error:
        return Fault(number, error.info.status, error.code, error.detail)


async def run(runtime: Runtime) -> None:
    config = runtime.config
    facts = NodeFacts(config.node, config.zone, runtime.boot_id, runtime.url)
    store = Store(config.store_dir, config.store_quota_bytes, close=DropBehind())
    budget = Budget(config.stage_bytes_per_s or DEFAULT_SHARE * memory_speed())
    log.info("background_budget", bytes_per_s=round(budget.bytes_per_s), threads=config.stage_threads)
    journal = Journal(config.store_dir, config.node)
    places = Places(
        store,
        journal,
        config.arena_dir,
        config.slot_bytes,
        stage_threads=config.stage_threads,
        budget=budget,
        workers=config.workers,
        activation_bytes=config.activation_bytes,
        numa_nodes=config.numa_nodes,
        verify_max_age_ns=round(config.verify_max_age_s * 1e9),
    )
    _reclaim_abandoned(places)
    async with Client(config.member_urls, token=config.token(), ca_file=config.ca_file, timeout_s=PLANE_TIMEOUT_S) as client:
        plane = cast(ControlPlane, ClientPlane(client))
        bounds = Bounds(config.max_deployments, config.start_wait_s)
        loop = Loop(facts, Desired(Identity(config.node, runtime.boot_id)), places, plane, bounds)
        peers = [Peer(runtime.worker_socket(index), loop.kick) for index in range(config.workers)]
        prober = Peer(runtime.prober_socket(), lambda: None)
        with httpx.Client(timeout=config.fetch_timeout_s, follow_redirects=False, trust_env=False) as http:
            fetcher = Fetcher(store, opener(config.artifact_roots, http, Buckets(config.s3).source), Patience(config.fetch_attempts))
            provider = StoreProvider(store, fetcher, plane, loop.keep, known.chosen(config.engines))
            crew = Crew(peers, prober, config.load_timeout_s)
            meter = runtime.meter("control")
            serve = lambda record: InProcess(Station(record, places), crew, kernel())  # noqa: E731 - in reading order
            observer, gate = Observer(meter), _gate(runtime)
            front = Peer(runtime.front_socket(), lambda: None)
            scrubs = ScrubMeans(config.scrub_interval_s, budget, idle_thread(), crew, observer)
            mender = lambda name, model, memory, kick: Mender(  # noqa: E731
                name, model, memory, front, store, provider, kick, most_in_place=config.mend_blocks
            )
            beside = scrubber(scrubs, mender)
            means = Means(config.node, runtime.boot_id, plane, provider, serve, observer, gate, beside)
            server = Server(Answers(loop, facts, store, meter).answer, lambda: None)
            await server.start(runtime.control_socket())
            log.info("control_runs", boot_id=runtime.boot_id, members=config.member_urls)
            compiling = asyncio.create_task(asyncio.to_thread(backend))  # seconds, the first time on a machine; staging would wait for it
            watching = [] if gate is None else [gate.watch()]
            await _until_stopped(runtime, [loop.run(means), *watching, *(peer.keep_connected() for peer in (*peers, prober, front))])
            await server.stop()
            await compiling


def _gate(runtime: Runtime) -> Gate | None:
    quiet, counted = runtime.config.quiet, runtime.tallies.get(("front", "0"))
    if quiet is None:
        return None
    assert counted is not None, "the supervisor hands control what the front counts"
    return Gate(quiet, lambda: totals(counted, table.REQUESTS))


Beside = Callable[[Tender], Callable[[], Coroutine[Any, Any, None]] | None]


def scrubber(means: ScrubMeans, mender: Callable[[str, str, ActiveMemory, Callable[[], None]], Mender]) -> Beside:
    """What reads the memory of a deployment again while it is tended, where this node can read it and was not told otherwise."""

    def beside(tender: Tender) -> Callable[[], Coroutine[Any, Any, None]] | None:
        if not means.interval_s or not isinstance(tender.serving, InProcess):
            return None
        record, memory = tender.remembered.record, ActiveMemory(tender.serving.station)
        scrub = Scrub(memory, mender(record.name, record.model, memory, tender.kick), tender.remembered, means)
        tender.scrubbed = scrub.look
        return scrub.run

    return beside


def _reclaim_abandoned(places: Places) -> None:
    record = places.journal.record
    named = {deployment.arena for deployment in record.deployments.values()}
    for found in inventory.abandoned(places.arena_dir, places.store.root, record.node, named):
        log.warning("arena_reclaimed", file=str(found.path), state=found.state.value, freed_bytes=inventory.reclaim(found.path))


async def _until_stopped(runtime: Runtime, work: Sequence[Any]) -> None:
    """Run everything until SIGTERM; the first thing that fails ends the process, which then starts anew."""
    running = [asyncio.create_task(item) for item in (*work, runtime.stopping.wait())]
    try:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await tasks.end(running)
