"""`raftmeta server`: builds one member in reading order, runs its API in this thread, and takes everything down in reverse.

The member's log starts before the port opens, so that a client that can connect finds at worst a member that is not ready. On SIGTERM the
API ends first (not ready, no new connections, requests in flight get their time), then the log: what was acknowledged is on disk, and
nothing is acknowledged after the log stopped. When the log stops by itself, the process says why and ends with a failure.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import structlog
import typer
import uvloop

from api.descriptors import connections_allowed
from api.guard import HttpLimits
from api.server import TOLD_AWAY, Listen, Server, make_server
from api.service import ApiLimits, Service
from raftmeta import collector, stderr
from raftmeta import config as configuration
from raftmeta.addresses import split_address
from raftmeta.cli.exits import Exit, UsageFault
from raftmeta.cli.program import command
from raftmeta.config import ServerConfig
from raftmeta.core.errors import RaftmetaError
from raftmeta.durable import OsDisk, lock_directory
from raftmeta.member import Member
from raftmeta.parts import accept_loss
from raftmeta.security.server_tls import ServerTls
from raftmeta.stderr import QueuedStderr

log = structlog.get_logger(__name__)

DEVELOPMENT_DATA = Path("raftmeta-data")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    config: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="server.toml as `raftmeta init` writes it.")] = None
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", metavar="DIR", help=f"Of the development member; ./{DEVELOPMENT_DATA} by default.")
    ] = None
    accept_data_loss_from: Annotated[
        int | None,
        typer.Option("--accept-data-loss-from", metavar="INDEX", min=1, help="Give up damaged records from here on, then end."),
    ] = None


def serve(options: ServerOptions) -> int:
    """Run a member. Without --config it is a single development member on loopback, with all its data in one directory."""
    try:
        settings = _settings(options)
    except RaftmetaError as fault:
        raise UsageFault(fault.detail, "correct the file or the RAFTMETA_* variable that it names") from fault
    output = stderr.install()  # before the first line: the log's thread writes some
    _log_to_stderr(settings.log_level)
    if options.accept_data_loss_from is not None:
        return _accept_loss(settings, options.accept_data_loss_from)
    limits = settings.limits
    connections = connections_allowed(limits.requests + limits.watchers, TOLD_AWAY + limits.pending_connections)
    member = Member.open(settings)
    if options.config is None:
        _notice(settings)
    member.start()
    try:
        uvloop.run(_serve(settings, member, output, connections))
    finally:
        member.stop()
    if member.fault:
        raise RaftmetaError("internal", f"the log stopped: {member.fault}")
    return Exit.OK


def _settings(options: ServerOptions) -> ServerConfig:
    if options.config is None:
        return ServerConfig.development((options.data_dir or DEVELOPMENT_DATA).absolute())
    if options.data_dir is not None:
        raise RaftmetaError("bad_field", "--data-dir belongs to the development member; with --config, set data_dir in the file")
    return configuration.load(options.config)


def _accept_loss(settings: ServerConfig, index: int) -> int:
    with lock_directory(settings.data_dir):
        first, last = accept_loss(settings, OsDisk(), index)
    sys.stderr.write(f"records {first} to {last} are given up; start the member again without --accept-data-loss-from\n")
    return Exit.OK


async def _serve(settings: ServerConfig, member: Member, output: QueuedStderr, connections: int) -> None:
    limits = settings.limits
    api_limits = ApiLimits(max_body_bytes=limits.body_bytes, max_in_flight=limits.requests)
    service = Service(member, asyncio.get_running_loop(), api_limits)
    service.stats.lost_log_lines = lambda: output.lost_lines
    host, port = split_address(settings.api.listen)
    certificate, key = settings.api.certificate, settings.api.key
    listen = Listen(host, port, ServerTls(certificate, key) if certificate and key else None)
    from api import app  # FastAPI takes a third of a second, in which the log finds its peers

    server = make_server(app.build(service), listen, HttpLimits(max_connections=connections), lambda: _begin_end(service))
    member.on_failed = lambda: _end(server)
    if member.failed.is_set():  # before there was somebody to tell
        _end(server)
    collector.settle()
    try:
        await server.serve()
    finally:
        service.close()


def _begin_end(service: Service) -> None:
    log.info("stopping", in_flight=service.in_flight)
    service.draining = True
    service.member.watch.close()


def _end(server: Server) -> None:
    """A member whose log has stopped cannot serve; whoever supervises the process decides what comes next."""
    server.should_exit = True


def _notice(settings: ServerConfig) -> None:
    sys.stderr.write(
        f"Development member: one member on loopback, no TLS, everybody may do everything.\n"
        f"  API   {settings.api.public_url} (documentation at /docs)\n"
        f"  data  {settings.data_dir} (kept between runs)\n"
        f"A cluster begins with `raftmeta init`.\n"
    )
    sys.stderr.flush()


def _log_to_stderr(level: str) -> None:
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(stream=sys.stderr, level=logging.ERROR, format="%(levelname)s %(name)s %(message)s")
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer() if not sys.stderr.isatty() else structlog.dev.ConsoleRenderer(),
        ],
    )


main = command("server", ServerOptions, serve)
