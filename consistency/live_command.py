"""`raftmeta live`: asks both sides of a deployment the same, all the time, and compares what they answer.

A check compares memory; this compares what comes of it, over whatever lies between: kernels, derived tensors, tokenizers, another build.
It needs a token that may ask models and look at nodes. What is found is recorded with the members as a verdict `diverged` of the order that
was known when it was asked, so that they refuse it once another one was given; that nothing was found is not recorded, since a verdict
`consistent` says more than this can know.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from consistency import live_report
from consistency.agent_answers import AgentFault
from consistency.agents import HttpAgents
from consistency.findings import DIVERGED, EXIT_STATUS
from consistency.live import Heard, Judgement, Kept, Kind, Ledger, Order, Question
from consistency.live_agents import LiveAgents
from consistency.live_report import Ran
from consistency.live_run import Probing
from consistency.node_http import HttpOptions, NodeHttp
from consistency.target import deployment_of
from consistency.two_sides import QuestionOptions, capacity_if_told, manifest_of, questions_for, seen_by_members
from consistency.watching import stopped_by_signals
from raftmeta.cli import output
from raftmeta.cli.program import command
from raftmeta.client.config import resolve
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import Manifest

if TYPE_CHECKING:
    from raftmeta.client import Client, Reply

TELL_S = 1.0
TELL_FILE_S = 60.0  # where each is a line of its own
RECORD_S = 300.0  # between records of a run that goes on finding differences; nothing older is recorded
RECORD_AGAIN_S = 10.0  # after one that was not taken
ORDER_S = 5.0  # between questions to the members what is ordered
MAX_SHARE_RATE = 1000.0  # samples a second by --share: nodes tell what they can compute, and a wrong word must not flood them
LOOK_S = 30.0  # between looks at the memory of one node
MAX_ACTIONS = 50  # that the report shows, the newest


@dataclass(frozen=True, kw_only=True)
class LiveOptions(QuestionOptions):
    seconds: Annotated[float | None, typer.Option("--for", metavar="SECONDS", min=1, help="Without it until Ctrl-C or SIGTERM.")] = None
    share: Annotated[
        float,
        typer.Option(
            "--share",
            metavar="SHARE",
            min=0.0001,
            max=1,
            help=f"Of the capacity of the smaller side; at most {MAX_SHARE_RATE:g} samples a second.",
        ),
    ] = 0.02
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="SAMPLES", min=0.01, max=100_000, help="A second, instead of --share.")
    ] = None
    lag_limit: Annotated[float, typer.Option("--lag-limit", metavar="SECONDS", min=0, help="How long a side may be behind the other.")] = (
        10.0
    )
    least_coverage: Annotated[
        float, typer.Option("--least-coverage", metavar="SHARE", min=0, max=1, help="Of the samples; less is incomplete.")
    ] = 0.9
    look: Annotated[
        bool, typer.Option("--look/--no-look", help="After a difference let both nodes read their memory, and mend what is wrong there.")
    ] = True
    record: Annotated[bool, typer.Option("--record/--no-record", help="Keep differences with the members.")] = True


def _live(options: LiveOptions) -> int:
    """Ask both sides of a deployment the same, all the time, and compare what they answer.

    Exit status: 0 everything compared was within tolerance; 1 something was not; 2 too little could be compared; 3 wrong command line.
    """
    with output.Progress(quiet=options.json) as progress:
        ran = asyncio.run(_work(options, progress))
    if options.json:
        output.print_json(live_report.as_json(ran))
    else:
        output.console().print(live_report.as_text(ran), markup=False, end="", soft_wrap=True)
    return EXIT_STATUS[live_report.verdict(ran)]


async def _work(options: LiveOptions, progress: output.Progress) -> Ran:
    connection = resolve(options.url or (), options.config)
    http = HttpOptions(token=connection.token(), ca_file=connection.ca_file, timeout_s=options.node_timeout, max_at_once=256)
    async with options.connect(progress.say) as client, NodeHttp(http) as nodes, HttpAgents(http) as memories:
        session = _Session(options, client, LiveAgents(nodes, options.node_timeout, probes=True), memories, progress)
        return await session.run()


@dataclass
class _Session:
    options: LiveOptions
    client: Client
    agents: LiveAgents
    memories: HttpAgents
    progress: output.Progress
    actions: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_ACTIONS))
    looked_at: dict[str, float] = field(default_factory=dict)  # by node, monotonic
    urls: Mapping[str, str] = field(default_factory=dict)
    record_at: float = float("-inf")  # monotonic, not before
    recorded: Kept | None = None  # the last sample that was offered to the members
    ran: Callable[[], Ran] = field(init=False)
    model: str = ""
    _dtypes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _roots: dict[str, str] = field(default_factory=dict)  # of versions, as they were published

    async def run(self) -> Ran:
        deployment, sides = await seen_by_members(self.client, self.options.deployment)
        self.model, self.urls = deployment.model, sides.urls
        questions, sources = await questions_for(self.options, sides, self.agents, await self._learn(deployment.version))
        first = next(questions)
        capacity = await capacity_if_told(sides, self.agents, first, self.options.rate)
        rate = rate_of(self.options, capacity, first.rows)
        assert deployment.standby is not None
        ledger = Ledger({"primary": deployment.primary.nodes, "standby": deployment.standby.nodes}, self.options.lag_limit)
        probing = Probing(sides, self.agents, ledger, questions, self._dtypes_of, self._act, rate, sources)
        probing.order = order_of(await self.client.get_deployment(self.options.deployment))
        began = time.monotonic()

        def ran() -> Ran:
            passed = time.monotonic() - began
            least = self.options.least_coverage
            return Ran(
                deployment.name,
                deployment.model,
                passed,
                rate,
                capacity,
                probing.skipped,
                sources,
                least,
                ledger,
                tuple(self.actions),
                probing.refused,
            )

        self.ran = ran
        with stopped_by_signals() as stop:
            if self.options.seconds is not None:
                asyncio.get_running_loop().call_later(self.options.seconds, stop.set)
            beside = [asyncio.create_task(self._tell(ran)), asyncio.create_task(self._follow(probing))]
            try:
                await probing.run(stop)
            finally:
                for task in beside:
                    task.cancel()
                await asyncio.gather(*beside, return_exceptions=True)
        if ledger.kept and ledger.kept[-1] is not self.recorded:
            await self._record()
        return ran()

    async def _follow(self, probing: Probing) -> None:
        while True:
            await asyncio.sleep(ORDER_S)
            try:
                probing.order = order_of(await self.client.get_deployment(self.options.deployment))
            except RaftmetaError as error:  # what is found meanwhile is of the order before; if there is another by now, it is refused
                self.progress.say(output.printable(f"{self.options.deployment}: the members do not say what is ordered: {error}"))

    async def _tell(self, ran: Callable[[], Ran]) -> None:
        while True:
            await asyncio.sleep(TELL_S if sys.stderr.isatty() else TELL_FILE_S)
            self.progress.say(live_report.line(ran()))

    # --- before the first question

    async def _dtypes_of(self, version: str) -> tuple[str, ...]:
        if version not in self._dtypes:
            await self._learn(version)
        return self._dtypes[version]

    async def _learn(self, version: str) -> Manifest:
        manifest = await manifest_of(self.client, self.model, version)
        self._roots[version] = manifest.vector_root
        self._dtypes[version] = tuple(sorted({tensor.dtype for tensor in manifest.tensors}))
        return manifest

    # --- after a difference

    async def _act(self, question: Question, primary: Heard, standby: Heard, judged: Judgement) -> None:
        self.progress.say(output.printable(f"{self.options.deployment}: {primary.node} and {standby.node} differ: {judged.detail}"))
        if self.options.look:
            due = [heard for heard in (primary, standby) if time.monotonic() - self.looked_at.get(heard.node, float("-inf")) >= LOOK_S]
            self.looked_at |= {heard.node: time.monotonic() for heard in due}
            self.actions.extend(await asyncio.gather(*(self._look_at(heard.node) for heard in due)))
            if len(due) == 2 and judged.kind is Kind.COMPARED:
                self.actions.extend(await self._beside(primary.node, standby.node))
        if time.monotonic() >= self.record_at:
            await self._record()

    async def _look_at(self, node: str) -> str:
        """Let the node compute the vector of its memory: one that is wrong is looked at whole, and mended, by the node itself."""
        try:
            seen = await self.memories.vector(self.urls[node], self.options.deployment, entries=False)
        except AgentFault as fault:
            return f"{node}: its memory could not be looked at: {fault}"
        root = self._roots.get(seen.version, "")
        if not root:
            return f"{node}: it serves {seen.version}, which nobody asked for here"
        if seen.vector_root == root:
            return f"{node}: its memory holds {seen.version} as it was published"
        hint = "the node mends it where its scrub runs, and `raftmeta check` names the block"
        return f"{node}: its memory is not {seen.version} as it was published; {hint}"

    async def _beside(self, primary: str, standby: str) -> list[str]:
        """What else two nodes with the same bytes may differ in."""
        try:
            ours, theirs = await asyncio.gather(
                *(self.agents.standing(self.urls[node], self.options.deployment) for node in (primary, standby))
            )
        except AgentFault as fault:
            return [f"what lies beside the weights could not be compared: {fault}"]
        tensors = sorted(name for name in ours.derived.keys() | theirs.derived.keys() if ours.derived.get(name) != theirs.derived.get(name))
        said = [f"tensors that modules hold outside the slot differ: {', '.join(tensors[:5])}"] if tensors else []
        if ours.config_digest != theirs.config_digest:
            said.append("configuration or tokenizer files differ")
        if ours.kernel != theirs.kernel:
            said.append(f"they compute with different kernels: {ours.kernel or 'unknown'}, {theirs.kernel or 'unknown'}")
        return said

    async def _record(self) -> None:
        """Offer the newest difference to the members, as one of the order that was known when it was asked."""
        ran = self.ran()
        kept = self.recorded = ran.ledger.kept[-1]
        self.record_at = time.monotonic() + RECORD_S
        if not self.options.record:
            return
        now_ms = time.time_ns() // 1_000_000
        why = _unrecordable(kept, now_ms)
        if not why:
            assert kept.order is not None
            nodes = sum(map(len, ran.ledger.nodes.values())) - len(ran.ledger.uncompared)
            basis = kept.order.basis | {"node_count": nodes, "age_ms": max(0, now_ms - kept.at_ms)}
            try:
                await self.client.record_verdict(self.options.deployment, DIVERGED, live_report.for_record(ran), basis=basis)
            except RaftmetaError as error:
                why = str(error)
        if why:
            self.record_at = time.monotonic() + RECORD_AGAIN_S
            self.actions.append(f"not recorded: {why}")


def rate_of(options: LiveOptions, capacity: float, rows: int) -> float:
    """Samples a second, from requests a second of the smaller side and samples of a request."""
    return options.rate or min(MAX_SHARE_RATE, max(0.01, options.share * capacity * rows))


def order_of(reply: Reply) -> Order:
    """What a deployment, as a member shows it, is ordered to serve."""
    seen = deployment_of(reply)
    return Order(reply.generation, seen.order_revision, seen.version, reply.revision, seen.in_flight)


def _unrecordable(kept: Kept, now_ms: int) -> str:
    """Why no verdict follows from a difference, "" when one does."""
    order = kept.order
    if order is None:
        return "it is not known what was ordered"
    if order.in_flight or order.version not in (kept.primary.version, kept.standby.version):
        return f"{order.version} was being switched to"
    age_s = (now_ms - kept.at_ms) / 1000
    return f"the last difference is {age_s:.0f} s old, {RECORD_S:g} s are allowed" if age_s > RECORD_S else ""


main = command("live", LiveOptions, _live)
