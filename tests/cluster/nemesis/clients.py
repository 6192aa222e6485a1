"""Clients that write and read while the members are harmed, and keep every operation with its times for the judges.

The register is a deployment: declaring it again replaces its nodes, and one linearizable GET shows them with the revision it was served
at. (The newest label of a model would be read through pages of versions, which grow without end.) A value is one node's name, written once.
Registers are retired after a while, so that each has a history short enough for the exhaustive search. Beside registers, versions are
published, each of which must be found at the end, and large verdicts fill the journal so that segments and snapshots come due.

A write is repeated under its idempotency key, at any member, until it is acknowledged or its tries are used up. It is left out of the
history only when the product said of every try that it was not applied: should a read show it all the same, the judges see a value that
nobody wrote.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from random import Random

import msgspec

from raftmeta.client.backoff import RetryPolicy
from raftmeta.client.client import Client, all_items
from raftmeta.client.transport import Options
from raftmeta.client.values import Reply, idempotency_key
from raftmeta.core.errors import ErrorClass, RaftmetaError
from tests.cluster.nemesis.members import Members
from tests.support.linearizability import Operation
from tests.support.real_cluster import manifest

CLIENTS = 8  # beside those that write large verdicts
SLOTS = 5  # registers in use at a time
RETIRE_AFTER = 140  # operations on one register; the exhaustive search takes about 200
RETIRE_UNKNOWN = 3  # writes without an answer: each may take effect at any later time, which the search has to try
MAX_REGISTERS = 900  # of 1,000 deployments that a cluster takes
PACE_S = 0.02  # mean pause of a client between two operations
TRIES = 4
CALL_S = 3.0
RETRY_PAUSE_S = 0.1
ATTEMPT = RetryPolicy(attempt_timeout_s=1.5, connect_timeout_s=0.5, longest_wait_s=0.5, longest_retry_after_s=0.5)
MODEL, BALLAST = "m", "ballast"
VERDICT_BYTES = 60_000  # of the 64 KiB that a report may have
VERDICT_PAUSE_S = 0.15
FLOOD = 10  # verdicts under way at once while a disk is being filled

Send = Callable[[Client, str], Awaitable[Reply]]


class Counts(msgspec.Struct):
    written: int = 0
    read: int = 0
    failed_writes: int = 0  # not applied, said the product
    failed_reads: int = 0
    unknown: int = 0
    refused: int = 0  # 507: the disk was full


class Slot(msgspec.Struct):
    """A place for a register; `name` is the one in use, "" while the next is being made."""

    number: int
    name: str = ""
    generation: int = 0
    operations: int = 0
    unknown: int = 0  # writes that were not acknowledged

    @property
    def worn(self) -> bool:
        return self.operations >= RETIRE_AFTER or self.unknown >= RETIRE_UNKNOWN


class Clients:
    def __init__(self, members: Members, seed: int) -> None:
        self._random = Random(f"clients {seed}")
        options = Options(token=members.token, ca_file=members.authority, timeout_s=CALL_S, policy=ATTEMPT)
        self.one = {zone: Client([url], options=options) for zone, url in members.urls.items()}
        self._any = [Client(list(members.urls.values()), options=options) for _ in range(CLIENTS)]
        self._slots = [Slot(number) for number in range(SLOTS)]
        self._registers = self._values = 0
        self._ballast_basis: dict[str, object] = {}  # what the verdicts are of
        self._stopping = asyncio.Event()
        self.flood = ""  # a zone: write large verdicts there as fast as they are taken
        self.history: list[Operation] = []
        self.acknowledged: list[Operation] = []
        self.published: list[Operation] = []  # of those the publications
        self.counts = Counts()
        self.problems: list[str] = []  # answers that no fault explains

    async def prepare(self) -> None:
        """The model, the deployment of the verdicts and the first registers. Raises RaftmetaError."""
        await self._any[0].publish(MODEL, "v0", manifest("v0"))
        declared = await self._any[0].declare_deployment(BALLAST, _body("nothing"))
        order = {"generation": declared.generation, "order_revision": 0, "version": "", "started_revision": declared.revision}
        self._ballast_basis = order | {"node_count": 0}
        for slot in self._slots:
            await self._renew(0, slot)

    async def run(self) -> None:
        """Until `stop`; what is under way then is brought to its end."""
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._live(number, Random(self._random.random())))
            for number in range(FLOOD):
                group.create_task(self._fill(CLIENTS + number))

    def stop(self) -> None:
        self._stopping.set()

    async def close(self) -> None:
        for client in (*self.one.values(), *self._any):
            await client.close()

    # ------------------------------------------------------------------ one client

    async def _live(self, number: int, random: Random) -> None:
        while not self._stopping.is_set():
            await asyncio.sleep(random.expovariate(1 / PACE_S))
            if self.flood and number >= len(self.one):
                continue  # leaves the processors to the flood
            slot, kind = random.choice(self._slots), random.random()
            if kind < 0.04:
                await self._publish(number, random)
            elif not slot.name:
                continue
            elif slot.worn and self._registers < MAX_REGISTERS:
                await self._renew(number, slot)
            elif kind < 0.5:
                await self._write(number, slot, random)
            else:
                await self._read(number, slot, random)

    def _target(self, number: int, random: Random) -> Client:
        """The first clients stay with a member each, so that writes stand still only while no member can take any; the others roam."""
        if self.flood and number >= CLIENTS:
            return self.one[self.flood]
        if number < len(self.one):
            return list(self.one.values())[number]
        return self._any[number % CLIENTS] if random.random() < 0.4 else random.choice(list(self.one.values()))

    async def _renew(self, number: int, slot: Slot) -> None:
        """Retire the slot's register for a new one, which nobody else uses before its first write is acknowledged."""
        slot.name = ""
        for _ in range(TRIES):
            self._registers += 1
            slot.generation += 1
            name = f"r{slot.number}-{slot.generation}"
            if await self._declare(number, name, self._random):
                slot.name, slot.operations, slot.unknown = name, 1, 0
                return
        slot.name, slot.operations, slot.unknown = f"r{slot.number}-{slot.generation}", 0, RETIRE_UNKNOWN  # the next who comes tries again

    async def _write(self, number: int, slot: Slot, random: Random) -> None:
        name = slot.name
        slot.operations += 1
        if not await self._declare(number, name, random) and slot.name == name:
            slot.unknown += 1

    async def _declare(self, number: int, name: str, random: Random) -> bool:
        value = self._value()
        return await self._send(number, (name, value), random, lambda to, key: to.declare_deployment(name, _body(value), key=key))

    async def _publish(self, number: int, random: Random) -> None:
        label = self._value()
        if await self._send(
            number, (f"version {label}", label), random, lambda to, key: to.publish(MODEL, label, manifest(label), key=key)
        ):
            self.published.append(self.acknowledged[-1])

    async def _fill(self, number: int) -> None:
        """Large verdicts: one at a time now and then, several at once as fast as they are taken while there is a flood."""
        random = Random(self._random.random())
        while not self._stopping.is_set():
            if not self.flood and number > CLIENTS:
                await asyncio.sleep(VERDICT_PAUSE_S)
                continue
            await self._record(number, random)
            await asyncio.sleep(0 if self.flood else VERDICT_PAUSE_S)

    async def _record(self, number: int, random: Random) -> None:
        report = {"ballast": secrets.token_hex(VERDICT_BYTES // 2)}
        basis = self._ballast_basis
        send: Send = lambda to, key: to.record_verdict(BALLAST, "incomplete", report, basis=basis, key=key)  # noqa: E731 - its type has to be told
        await self._send(number, ("verdicts", self._value()), random, send)

    async def _read(self, number: int, slot: Slot, random: Random) -> None:
        name = slot.name
        slot.operations += 1
        await self.read(number, self._target(number, random), name)

    async def read(self, number: int, target: Client, name: str) -> bool:
        """Read a register once; whether it was answered."""
        invoked = time.monotonic()
        try:
            reply = await target.get_deployment(name)
        except RaftmetaError as refused:
            if refused.code == "unknown_deployment":  # it was acknowledged before anybody reads it
                self.history.append(Operation(number, name, "read", "", invoked, time.monotonic()))
                self.problems.append(f"a read of {name} after its first write was acknowledged found nothing")
            elif refused.info.error_class is not ErrorClass.UNAVAILABLE:
                self.problems.append(f"read of {name}: {refused}")
            self.counts.failed_reads += 1
            return False
        value = reply["primary"]["nodes"][0]
        self.history.append(Operation(number, name, "read", value, invoked, time.monotonic(), reply.revision))
        self.counts.read += 1
        return True

    async def _send(self, number: int, what: tuple[str, str], random: Random, send: Send) -> bool:
        """A write of (key, value) under one idempotency key; whether it was acknowledged."""
        key, value = what
        idempotent = idempotency_key(time.time_ns() // 1_000_000)
        invoked, perhaps = time.monotonic(), False
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(RETRY_PAUSE_S)
            try:
                reply = await send(self._target(number, random), idempotent)
            except RaftmetaError as refused:
                perhaps = self._refused(refused, key) or perhaps
                continue
            done = Operation(number, key, "write", value, invoked, time.monotonic(), reply.revision)
            self.history.append(done)
            self.acknowledged.append(done)
            self.counts.written += 1
            return True
        if perhaps:
            self.history.append(Operation(number, key, "write", value, invoked, None))
            self.counts.unknown += 1
        else:
            self.counts.failed_writes += 1
        return False

    def _refused(self, refused: RaftmetaError, key: str) -> bool:
        """Whether the write may have been applied all the same."""
        if refused.code == "disk_full":
            self.counts.refused += 1
        elif refused.info.error_class is not ErrorClass.UNAVAILABLE:
            self.problems.append(f"write of {key}: {refused}")
            return True
        return refused.code in ("unknown_outcome", "revision_not_reached")

    def _value(self) -> str:
        self._values += 1
        return f"v{self._values}"

    # ------------------------------------------------------------------ afterwards

    async def read_everything(self) -> tuple[dict[str, dict[str, str]], list[str]]:
        """What every register shows on every member, by member, as reads of the history; and what could not be read."""
        names = sorted({operation.key for operation in self.acknowledged if _is_register(operation.key)})
        shown: dict[str, dict[str, str]] = {}
        unread = []
        for zone, client in self.one.items():
            for name in names:
                if await self.read(CLIENTS, client, name):
                    shown.setdefault(zone, {})[name] = self.history[-1].value
                else:
                    unread.append(f"{name} could not be read on {zone}")
        return shown, unread

    async def missing_versions(self) -> list[str]:
        """Acknowledged publications that a member does not show, or shows at another revision."""
        missing = []
        for zone, client in self.one.items():
            shown: dict[str, int] = {}
            async for item in all_items(partial(client.list_versions, MODEL)):
                shown[item["label"]] = item["published_revision"]
            for published in self.published:
                if shown.get(published.value) != published.revision:
                    found = shown.get(published.value, "nothing")
                    missing.append(f"{published.key}, acknowledged at revision {published.revision}: {zone} shows {found}")
        return missing


def _is_register(key: str) -> bool:
    return key.startswith("r")


def registers(history: Sequence[Operation]) -> dict[str, list[Operation]]:
    """The histories of the registers, which are short; the rest has no reads to speak of."""
    found: dict[str, list[Operation]] = {}
    for operation in history:
        if _is_register(operation.key):
            found.setdefault(operation.key, []).append(operation)
    return found


def _body(value: str) -> dict[str, object]:
    return {"model": MODEL, "primary": {"zone": "z", "nodes": [value]}, "standby": None}
