"""The prober process: waits for a version to try, and tries it. The libraries are loaded while nobody asks.

It goes on after a version that was proved and let its memory go. After one that was refused, or that left memory behind, it ends: its
supervisor starts a clean one at once.
"""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from node_agent.config import AgentConfig
from node_agent.engine import known
from node_agent.ipc import Server
from node_agent.memory import private_bytes
from node_agent.messages import Fault, Numbered, Prove, Proved, Reply
from node_agent.runtime import Runtime, log

if TYPE_CHECKING:
    from node_agent.loading import Engines

FIRST_LEFT_BYTES = 512 << 20  # that the first proof may leave behind: caches and threads of the libraries
LEFT_BYTES = 64 << 20  # and every later one beside that


async def run(runtime: Runtime) -> None:
    """Until SIGTERM, or until this process is no longer as it began."""
    loop, trying = asyncio.get_running_loop(), ThreadPoolExecutor(1, "prove")  # one thread: half an import is seen by a second one
    used = asyncio.Event()
    limit = 0  # of this process's own memory once a proof is over

    def prove(call: Prove) -> Reply:
        nonlocal limit
        engines = known.load(runtime.config.engines)
        first, limit = not limit, limit or private_bytes() + FIRST_LEFT_BYTES
        reply = _prove(runtime.config, engines, call)
        gc.collect()  # modules are full of cycles
        left = private_bytes()
        if not isinstance(reply, Proved) or left > limit:
            loop.call_soon_threadsafe(used.set)
        elif first:
            limit = left + LEFT_BYTES
        return reply

    async def answer(call: Numbered) -> Reply:
        if not isinstance(call, Prove):
            return Fault(call.number, 400, "bad_request", f"a prober does not answer {type(call).__name__}")
        return await loop.run_in_executor(trying, prove, call)

    server = Server(answer, lambda: None)
    await server.start(runtime.prober_socket())
    loading = loop.run_in_executor(trying, known.load, runtime.config.engines)
    ends = [asyncio.create_task(event.wait()) for event in (used, runtime.stopping)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if used.is_set():
        await server.finish()
    await server.stop()
    for task in ends:
        task.cancel()
    await loading
    log.info("prober_ends", used=used.is_set())


def kernel() -> str:
    """What computes on this node, as probes record it."""
    libraries = {library: _version(library) for library in ("torch", "transformers")}
    return "".join(f"{library} {found} " for library, found in libraries.items() if found) + "cpu"


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def _prove(config: AgentConfig, engines: Engines, call: Prove) -> Reply:
    import torch

    from node_agent.loading import Loader
    from node_agent.prober import ProbePlaces, Prober
    from node_agent.store import Store

    torch.set_num_threads(config.threads)
    loader = Loader(Store(config.store_dir, config.store_quota_bytes), engines)
    places = ProbePlaces(config.store_dir, config.arena_dir, config.warm_limit_s, kernel(), config.threads)
    return Prober(places, loader).prove(call)
