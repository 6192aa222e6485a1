"""The prober process: waits for a version to try, tries it, and ends. Torch and the engines are loaded when there is something to try.

Its supervisor starts it again at once. Until it is asked to make ready it is a small process that waits on a socket.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

from node_agent.config import AgentConfig
from node_agent.ipc import Server
from node_agent.messages import Done, Fault, MakeReady, Numbered, Prove, Reply
from node_agent.runtime import Runtime, log


async def run(runtime: Runtime) -> None:
    """Until one version was tried and its answer is out, or SIGTERM."""
    done = asyncio.Event()
    loop, trying = asyncio.get_running_loop(), ThreadPoolExecutor(1, "prove")  # one thread: half an import is seen by a second one

    async def answer(call: Numbered) -> Reply:
        if isinstance(call, MakeReady):
            await loop.run_in_executor(trying, _load_libraries)
            return Done(call.number)
        if not isinstance(call, Prove):
            return Fault(call.number, 400, "bad_request", f"a prober does not answer {type(call).__name__}")
        if done.is_set():
            return Fault(call.number, 409, "prober_busy", "one version at a time; ask the next prober")
        done.set()
        return await loop.run_in_executor(trying, _prove, runtime.config, call)

    server = Server(answer, lambda: None)
    await server.start(runtime.prober_socket())
    asked, stopped = asyncio.create_task(done.wait()), asyncio.create_task(runtime.stopping.wait())
    await asyncio.wait({asked, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not runtime.stopping.is_set():
        await server.finish()
    await server.stop()
    for task in (asked, stopped):
        task.cancel()
    log.info("prober_ends", proved=done.is_set())


def kernel() -> str:
    """What computes on this node, as probes record it."""
    return f"torch {version('torch')} transformers {version('transformers')} cpu"


def _load_libraries() -> None:
    """Seconds of a processor, which a version on its way leaves time for. Nothing needs the names."""
    import torch  # noqa: F401
    import transformers  # noqa: F401

    import node_agent.engine.hf  # noqa: F401


def _prove(config: AgentConfig, call: Prove) -> Reply:
    import torch

    from node_agent.engine.hf import HfEngine
    from node_agent.loading import Loader
    from node_agent.prober import ProbePlaces, Prober
    from node_agent.store import Store

    torch.set_num_threads(config.threads)
    loader = Loader(Store(config.store_dir, config.store_quota_bytes), {"hf": HfEngine})
    places = ProbePlaces(config.store_dir, config.arena_dir, config.warm_limit_s, kernel(), config.threads)
    return Prober(places, loader).prove(call)
