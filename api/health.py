"""Whether this member should get traffic: each condition with its reason. Reads published values only and never waits."""

from __future__ import annotations

from api.schemas.answers import ReadyCheck
from api.service import Service
from raftmeta.log.port import LogStatus

MAX_SILENCE_MS = 5_000  # since the leader last confirmed this member's state; a few elections
NOTABLE_CLOCK_MS = 10_000  # members tell each other their clocks every ten seconds
MAX_LAG = 1_000  # committed records that a ready member may still have to apply; well under a second of work


def checks(service: Service) -> tuple[ReadyCheck, ...]:
    status = service.member.log.status()
    draining = "the process was asked to end" if service.draining else "the process takes requests"
    return (
        ReadyCheck("process", not service.draining, draining),
        _engine(status),
        _leader(status, service.member.log.staleness_ms()),
        _caught_up(status),
        _clock(status),
        *(ReadyCheck(check.name, check.ok, check.reason) for check in service.member.checks()),
    )


def _engine(status: LogStatus) -> ReadyCheck:
    if status.fault or status.role == "stopped":
        return ReadyCheck("log", False, f"the log has stopped: {status.fault or 'it was asked to'}")
    return ReadyCheck("log", True, f"the log runs as {status.role}, last sync took {status.sync_ms:.1f} ms")


def _leader(status: LogStatus, silence_ms: float) -> ReadyCheck:
    if not status.leader_id:
        return ReadyCheck("leader", False, f"no leader is known in term {status.term}")
    known = f"{status.leader_id} leads in term {status.term}"
    if silence_ms > MAX_SILENCE_MS:
        since = "never" if silence_ms == float("inf") else f"{silence_ms:.0f} ms ago"
        return ReadyCheck("leader", False, f"{known}, but this member's state was confirmed {since}, {MAX_SILENCE_MS} ms are allowed")
    return ReadyCheck("leader", True, known)


def _clock(status: LogStatus) -> ReadyCheck:
    """A wrong clock decides nothing, so it keeps nobody from being ready; it is said for whoever sets clocks."""
    offset_ms = status.clock_offset_ms
    if abs(offset_ms) < NOTABLE_CLOCK_MS:
        return ReadyCheck("clock", True, "this member's clock agrees with what most members' say")
    way = "ahead of" if offset_ms > 0 else "behind"
    return ReadyCheck("clock", True, f"this member's clock is {abs(offset_ms) / 1000:.0f} s {way} what most members' say; set it right")


def _caught_up(status: LogStatus) -> ReadyCheck:
    behind = status.commit_index - status.applied_index
    return ReadyCheck("applied", behind <= MAX_LAG, f"{behind} committed records are to be applied, {MAX_LAG} are allowed")
