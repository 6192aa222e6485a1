"""The story that the demo tells, step by step. Each step does one thing a user would do, and leaves its figures behind.

Order matters where it says so: the fine-tuning ends before the steady window begins, because it would be measured otherwise; the load runs
from before the first switch under load until after the last check, so that no moment escapes it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raftmeta.cli.demo import measure, report
from raftmeta.cli.demo.errors import DemoError
from raftmeta.cli.demo.fleet import AGENTS, PROGRAM, ZONES, Fleet
from raftmeta.cli.demo.load import Load, Probes, Target, service_time_s
from raftmeta.cli.demo.monitor import Monitor
from raftmeta.cli.demo.processes import Child, Children, run_to_end
from raftmeta.cli.demo.screen import Screen, step
from raftmeta.cli.demo.writer import Writer
from raftmeta.cli.follow import describe, failure_text, follow
from raftmeta.client import Client, Options, Reply
from raftmeta.client.backoff import RetryPolicy

RATE = 12.0  # requests per second and side; one worker with one thread answers a sentence in about 20 ms
LEAST_RATE = 2.0
BUSY = 0.35  # share of its time that a side may spend on answers: on a machine that is slower or shared, fewer are asked
CALIBRATION = 40  # requests one after the other
WARM_S = 1.0  # of load before anything is measured
STEADY_S = 10.0
ROLLOUT_S = 60.0
LAG_LIMIT_MS = 1000  # the check's own default is 200; here both nodes, the members and the load share one machine's processors
WRITES = 25  # acknowledged before the kill, and again after it
FINETUNE_S = 90.0
PROBE_S = 60.0
TOLERANCE = 2e-3  # between an answer and its reference: the same weights in another process and batch differ by about 1e-6
DEPLOYMENT = "search"


@dataclass(frozen=True)
class Settings:
    model: str  # name of the published model
    source: Path  # directory of v1
    directory: Path  # where everything lies but the arenas
    arena_dir: Path
    steady_s: float = STEADY_S


class Story:
    """State of one run; `run` is the only way in."""

    def __init__(self, settings: Settings, screen: Screen, children: Children) -> None:
        self.settings = settings
        self.fleet = Fleet(settings.directory, children)
        self.loads: list[Load] = []
        self._screen = screen
        self._children = children
        self._versions: list[report.Version] = []
        self._manifests: dict[str, Mapping[str, Any]] = {}
        self._commit_ms: list[float] = []
        self._activations: list[report.Activation] = []
        self._busy: list[measure.Window] = []
        self._checks: list[report.Check] = []
        self._probing: dict[str, Child] = {}  # by label: who writes down what the version answers
        self._tried: list[report.Tried] = []
        self._killed = ""

    def run(self) -> report.Report:
        """The whole story, on its screen. Raises DemoError or RaftmetaError when a step does not work."""
        with self._screen:
            return asyncio.run(self._animated())

    async def _animated(self) -> report.Report:
        moving = asyncio.create_task(self._screen.animate())
        try:
            return await self._tell()
        finally:
            moving.cancel()

    async def _tell(self) -> report.Report:
        begin_s = time.monotonic()
        out = self.settings.directory / "versions"
        tuning = self._children.start("finetune", ["-m", "raftmeta.cli.demo.finetune", str(self.settings.source), str(out)], ends=True)
        self._probe("v1", self.settings.source)
        await self._start(out)
        async with self.fleet.client() as client, Monitor(self.fleet, self._screen.picture, self.loads):
            await self._first_version(client)
            reference = await self._finetuned(tuning, out)
            async with self._load(client, reference):
                steady = await self._steady()
                await self._publish(client, "v2", out / "v2")
                await self._activate(client, "v2")
                await self._check()
                failover = await self._failover(client, out / "v3")
                await self._roll_back(client)
                await self._check()
        return self._report(reference, steady, failover, time.monotonic() - begin_s)

    async def _start(self, out: Path) -> None:
        with step(self._screen, "make certificates and configuration: raftmeta init"):
            await self.fleet.init([self.settings.source, out], self.settings.arena_dir)
        with step(self._screen, "start three members, one per zone") as shown:
            for zone in ZONES:
                self.fleet.start_member(zone)
            async with self.fleet.client() as client:
                seen = await self.fleet.leader(client)
            shown.figure(f"{seen['leader_id']} leads in term {seen['term']}")
        with step(self._screen, "write down what v1 answers: raftmeta probe") as shown:
            await self._probed("v1")
            shown.figure("nodes try a version before anybody can ask it, and refuse one that answers otherwise")
        for _, node, _ in AGENTS:  # they import torch while v1 is published; not before, or it would be eight processes at once
            self.fleet.start_agent(node)

    async def _first_version(self, client: Client) -> None:
        await self._publish(client, "v1", self.settings.source)
        with step(self._screen, "start two agents, the primary in zone a and the standby in zone b"):
            await self.fleet.nodes(client)
            sides = {side: {"zone": zone, "nodes": [node]} for zone, node, side in AGENTS}
            await client.declare_deployment(DEPLOYMENT, {"model": self.settings.model, **sides})
        await self._activate(client, "v1")

    async def _finetuned(self, tuning: Child, out: Path) -> dict[str, Any]:
        with step(self._screen, "fine-tune v2 and v3 from v1, in a process of its own") as shown:
            await run_to_end(tuning, FINETUNE_S)
            self._children.forget(tuning)
            reference: dict[str, Any] = json.loads((out / "reference.json").read_text("utf-8"))
            done = "; ".join(f"{name}: {item['steps']} steps, {item['tensors']} tensors" for name, item in reference["trainings"].items())
            shown.figure(f"{done}; answers at least {reference['distance']:.3f} apart")
        with step(self._screen, "write down what v2 and v3 answer: raftmeta probe"):
            for label in ("v2", "v3"):
                self._probe(label, out / label)
            await asyncio.gather(*(self._probed(label) for label in ("v2", "v3")))
        return reference

    def _probe(self, label: str, directory: Path) -> None:
        words = [*PROGRAM, "probe", str(directory), "--out", str(self._probes_of(label))]
        self._probing[label] = self._children.start(f"probe-{label}", words, ends=True)

    async def _probed(self, label: str) -> Path:
        """The probes of a version, once they are written."""
        if (probing := self._probing.pop(label, None)) is not None:
            await run_to_end(probing, PROBE_S)
            self._children.forget(probing)
        return self._probes_of(label)

    def _probes_of(self, label: str) -> Path:
        return self.settings.directory / f"{label}.probes.json"

    @asynccontextmanager
    async def _load(self, client: Client, reference: dict[str, Any]) -> AsyncIterator[None]:
        """Open-loop clients on both sides for as long as the block lasts."""
        answers = {label: tuple(map(tuple, rows)) for label, rows in reference["answers"].items()}
        probes = Probes(tuple(reference["probes"]), answers, TOLERANCE)
        nodes = await self.fleet.nodes(client)
        token = self.fleet.token_file("inference").read_text("ascii").strip()
        targets = [Target(side, nodes[node]["url"], DEPLOYMENT, RATE, self.fleet.ca_file, token) for _, node, side in AGENTS]
        slowest_s = max(await asyncio.gather(*(service_time_s(target, probes.texts, CALIBRATION) for target in targets)))
        rate = max(LEAST_RATE, min(RATE, round(BUSY / slowest_s, 1)))
        self.loads += [Load(replace(target, rate=rate), probes) for target in targets]
        running = [asyncio.create_task(load.run()) for load in self.loads]
        try:
            yield
        finally:
            for load in self.loads:
                load.stop()
            await asyncio.gather(*running)

    async def _steady(self) -> measure.Window:
        with step(self._screen, f"ask both sides {self.loads[0].target.rate:g} times a second on a fixed schedule") as shown:
            await asyncio.sleep(WARM_S)
            window = measure.Window(time.monotonic(), time.monotonic() + self.settings.steady_s)
            await asyncio.sleep(self.settings.steady_s)
            figures = measure.latency(self._samples(), window, [])
            shown.figure(f"p50 {figures.steady_p50:.0f} ms, p99 {figures.steady_p99:.0f} ms")
        return window

    async def _publish(self, client: Client, label: str, directory: Path) -> None:
        with step(self._screen, f"publish {label}: raftmeta publish") as shown:
            model = self.settings.model
            unbound = self._manifests["v1"]["unbound"] if self._manifests else None
            known = [] if unbound is None else [word for name in unbound for word in ("--unbound", name)] or ["--all-bound"]
            known += ["--probes", str(await self._probed(label))]
            known += ["--no-blocks"] if directory == self.settings.source else []  # nothing is left in a directory that is not ours
            done = await self.fleet.command("publish", str(directory), "--model", model, "--label", label, *known)
            version = await client.get_version(model, label)
            self._versions.append(report.Version(label, version["number"], version["checksum"]))
            self._manifests[label] = dict(await client.get_manifest(model, label))
            self._commit_ms.append(float(done.value["commit_ms"]))
            size = sum(tensor["end"] - tensor["begin"] for tensor in self._manifests[label]["tensors"])
            shown.figure(f"{version['tensor_count']} tensors, {size / 1e6:.1f} MB, agreed by a quorum in {self._commit_ms[-1]:.1f} ms")

    async def _activate(self, client: Client, label: str) -> None:
        loaded = " under load" if self.loads else ""
        with step(self._screen, f"activate {label} on both sides{loaded}") as shown:
            done = await self._follow(client, await client.activate(DEPLOYMENT, label))
            shown.figure(
                f"{done.total_s:.2f} s, {done.bytes_fetched / 1e6:.1f} MB fetched, {done.bytes_from_active / 1e6:.1f} MB from the active "
                f"slot, {done.bytes_kept / 1e6:.1f} MB kept, switch {done.switch_call_us_max} us"
            )
            for node, seen in (await self.fleet.nodes(client)).items():
                self._tried.append(tried(label, node, await self.fleet.evidence(seen["url"], DEPLOYMENT)))

    async def _roll_back(self, client: Client) -> None:
        with step(self._screen, "roll back to the version before") as shown:
            done = await self._follow(client, await client.rollback(DEPLOYMENT))
            copied = done.bytes_fetched + done.bytes_read + done.bytes_from_active
            shown.figure(f"{done.to} after {done.total_s:.2f} s, {copied} bytes copied, switch {done.switch_call_us_max} us")

    async def _follow(self, client: Client, started: Reply) -> report.Activation:
        begin_s = time.monotonic()

        def say(text: str) -> None:
            self._screen.picture.phase = text
            self.fleet.check_alive()

        rollout = await follow(client, started, ROLLOUT_S, say)
        if self.loads:
            self._busy.append(measure.Window(begin_s, time.monotonic()))
        if rollout["status"] != "done":
            tails = "\n".join(f"{child.name}:\n{child.tail()}" for child in self.fleet.agents.values())
            raise DemoError(f"{describe(rollout)}: {failure_text(rollout)}", tails)
        done = measure.activation(rollout)
        self._activations.append(done)
        return done

    async def _check(self) -> None:
        with step(self._screen, "compare the memory of both sides: raftmeta check") as shown:
            done = await self.fleet.command("check", DEPLOYMENT, "--lag-limit", str(LAG_LIMIT_MS), answers=(0, 1, 2))
            check = to_check(done.value)
            self._checks.append(check)
            lag = f"lag {check.lag_ms_primary:.0f} and {check.lag_ms_standby:.0f} ms"
            told = [*done.value.get("findings", []), *done.value.get("reasons", [])]
            why = ", ".join(sorted({f"{each.get('code')} {each.get('node')}".strip() for each in told}))
            shown.figure(f"{check.verdict}{f' ({why})' if why else ''}, {check.mismatch_ratio:.2%} of the tensors differ, {lag}")

    async def _failover(self, client: Client, third: Path) -> report.Failover:
        """A client writes without pause; the leader is killed under it; the new leader takes v3 to both sides."""
        connection = self.fleet.connection()
        policy = RetryPolicy(attempt_timeout_s=2.0)  # a write held by a dying member is asked for elsewhere
        options = Options(token=connection.token(), ca_file=connection.ca_file, timeout_s=30.0, policy=policy)
        async with Client(connection.urls, options=options) as writing:
            writer = Writer(writing)
            running = asyncio.create_task(writer.run())
            try:
                with step(self._screen, "kill -9 the leader while a client writes") as shown:
                    await self._writes_go_on(writer)
                    self._killed = (await self.fleet.leader(client))["leader_id"]
                    killed_s = time.monotonic()
                    self.fleet.kill_member(self._killed)
                    await self._writes_go_on(writer)
                    leader = (await self.fleet.leader(client, other_than=self._killed))["leader_id"]
                    gap_ms = measure.longest_gap_ms([write.acknowledged_s for write in writer.writes], killed_s)
                    shown.figure(f"{self._killed} killed, {leader} leads, writes paused for {gap_ms:.0f} ms")
                await self._publish(client, "v3", third)
                await self._activate(client, "v3")
            finally:
                writer.stop()
                await running
            with step(self._screen, "start the killed member again and look for every acknowledged write") as shown:
                self.fleet.start_member(self._killed)
                await self.fleet.caught_up(self._killed, (await client.cluster()).revision)
                missing = await writer.missing()
                shown.figure(f"{len(missing)} of {len(writer.writes)} missing")
        gap_ms = measure.longest_gap_ms([write.acknowledged_s for write in writer.writes], killed_s)
        return report.Failover(self._killed, leader, gap_ms, len(writer.writes), len(missing))

    async def _writes_go_on(self, writer: Writer) -> None:
        if not await writer.wait_for_more(WRITES, timeout_s=45.0):
            refused = f"; the last refusal was {writer.refused[-1]}" if writer.refused else ""
            raise DemoError(f"only {len(writer.writes)} writes were acknowledged{refused}")

    def _samples(self) -> list[measure.Sample]:
        return [sample for load in self.loads for sample in load.samples]

    def _report(self, reference: dict[str, Any], steady: measure.Window, failover: report.Failover, seconds: float) -> report.Report:
        before = {"v2": ["v1"], "v3": ["v1", "v2"]}
        in_slot = {"v3": "v1"}  # the slot that v2's activation freed
        manifests = self._manifests
        unbound = frozenset(manifests["v1"].get("unbound", ()))
        samples = self._samples()
        return report.Report(
            model=self.settings.model,
            bytes=sum(tensor["end"] - tensor["begin"] for tensor in manifests["v1"]["tensors"]),
            versions=self._versions,
            publish_commit_ms=[round(value, 3) for value in self._commit_ms],
            activate=self._activations,
            requests=measure.requests(samples),
            latency_ms=measure.latency(samples, steady, self._busy),
            failover=failover,
            consistency=self._checks,
            tried=self._tried,
            expected=report.Expected(
                changed_bytes={
                    to: measure.differing_bytes(manifests[to], [manifests[name] for name in names], unbound) for to, names in before.items()
                },
                differing_bytes={to: measure.differing_bytes(manifests[to], [manifests[name]], unbound) for to, name in in_slot.items()},
                output_distance=float(reference["distance"]),
                beside_bytes={to: measure.block_check_bytes(manifests[to]) for to in before},
            ),
            seconds=round(seconds, 1),
        )

    def failures(self, count: int = 5) -> list[str]:
        """Why requests were lost or answered wrongly, the first few."""
        bad = [sample for sample in self._samples() if sample.outcome != "ok"]
        return [f"{sample.side}: {sample.outcome}: {sample.detail}" for sample in bad[:count]]


def tried(label: str, node: str, evidence: Mapping[str, Any]) -> report.Tried:
    """From a node's evidence; a node that serves something else, or tried nothing, has tried nothing of this version."""
    probed = evidence.get("probed") or {}
    measured = probed.get("measured", []) if evidence.get("version") == label else []
    values = [float(each["value"]) for each in measured if each["measure"] == "cosine" and each["holds"]]
    return report.Tried(label, node, len(values), min(values, default=0.0))


def to_check(answer: Mapping[str, Any]) -> report.Check:
    """The figures of a check's JSON; what it could not find out counts as wrong."""
    if not answer["deployments"]:
        return report.Check(str(answer["verdict"]), -1, -1, -1, -1, 1.0)
    value = answer["deployments"][0]
    return report.Check(
        verdict=str(value["verdict"]),
        models_primary=int(_number(value["models_primary"], unknown=-1)),
        models_standby=int(_number(value["models_standby"], unknown=-1)),
        lag_ms_primary=_number(value["lag_ms_primary"], unknown=-1),
        lag_ms_standby=_number(value["lag_ms_standby"], unknown=-1),
        mismatch_ratio=_number(value["mismatch_ratio"], unknown=1.0),
    )


def _number(value: object, unknown: float) -> float:
    return float(value) if isinstance(value, int | float) else unknown
