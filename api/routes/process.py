"""What orchestrators ask of the process: is it alive, is it ready, what do its counters say.

Liveness looks at nothing: if this answers, the event loop runs, and that is all it promises, whatever quorum or disk do. Readiness reads
published values only, so it answers while the log's thread waits for a disk.
"""

from __future__ import annotations

from typing import Any

from api import metrics, replies
from api.health import checks
from api.operation import Answer, Call, Kind, Operation, Reply
from api.schemas import answers
from api.service import Service
from raftmeta.core.errors import CODES


async def livez(service: Service, call: Call) -> Reply:
    return Reply(status=200, body=b'{"alive":true}')


async def readyz(service: Service, call: Call) -> Reply:
    found = checks(service)
    ready = all(check.ok for check in found)
    shown = found if call.query.verbose else tuple(check for check in found if not check.ok)
    status = 200 if ready else CODES["starting"].status
    headers = () if ready else ((b"retry-after", b"1"),)
    return Reply(status=status, body=replies.encode({"ready": ready, "checks": shown}), headers=headers)


async def get_metrics(service: Service, call: Call) -> Reply:
    page = metrics.page(service.member, service.stats)
    return Reply(status=200, body=page, content_type=metrics.METRICS_TYPE)


_READY: dict[str, Any] = {"ready": True, "checks": []}  # without `verbose` only the conditions that fail are shown
_NOT_READY = {"ready": False, "checks": [{"name": "leader", "ok": False, "reason": "no leader is known in term 5"}]}

OPERATIONS = (
    Operation(
        id="livez",
        method="GET",
        path="/livez",
        kind=Kind.DIRECT,
        action="",
        what="Whether the process answers at all",
        handler=livez,
        answers=(Answer(200, answers.Live, {"alive": True}, "It does"),),
        errors=(),
        hot=True,
    ),
    Operation(
        id="readyz",
        method="GET",
        path="/readyz",
        kind=Kind.DIRECT,
        action="",
        what="Whether this member should get traffic; with `verbose`, every condition with its reason",
        handler=readyz,
        answers=(
            Answer(200, answers.Ready, _READY, "Ready"),
            Answer(503, answers.Ready, _NOT_READY, "Not ready, and why"),
        ),
        errors=(),
        extra_query=("verbose",),
        hot=True,
    ),
    Operation(
        id="metrics",
        method="GET",
        path="/metrics",
        kind=Kind.DIRECT,
        action="metrics",
        what="Counters and gauges in Prometheus text form",
        handler=get_metrics,
        answers=(Answer(200, None, "raftmeta_revision 52.0\n", "The page", media="text/plain"),),
        errors=(),
    ),
)
