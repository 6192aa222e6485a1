"""Keeping the last verdict of a consistency check per deployment, as its checker reported it."""

from __future__ import annotations

from raftmeta.core.commands import RecordVerdict
from raftmeta.core.handlers.checks import SHOWN, Refusal
from raftmeta.core.types import Verdict
from raftmeta.core.work import Work

VERDICTS = ("consistent", "diverged", "incomplete")
MAX_REPORT_BYTES = 64 << 10


def record_verdict(work: Work, body: RecordVerdict) -> bytes | Refusal:
    if work.deployments.get(body.deployment) is None:
        return Refusal("unknown_deployment", f"no deployment {body.deployment[:128]!a}")
    if body.verdict not in VERDICTS:
        return Refusal("bad_field", f"verdict {body.verdict[:SHOWN]!a} is not one of {', '.join(VERDICTS)}")
    if len(body.report) > MAX_REPORT_BYTES:
        return Refusal("bad_field", f"the report has {len(body.report)} bytes, the limit is {MAX_REPORT_BYTES}")
    verdict = Verdict(body.deployment, body.verdict, body.report, work.principal, work.revision, work.cluster_ms)
    work.verdicts.put(body.deployment, verdict)
    return b""
