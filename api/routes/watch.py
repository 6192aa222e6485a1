"""The watch: one stream of server-sent events per watcher."""

from __future__ import annotations

from api.auth import reidentify
from api.operation import Answer, Call, Kind, Operation, Reply
from api.service import Service
from api.stream import WatchStream
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.events import Event

PATHS = {"model": "models/", "deployment": "deployments/", "rollout": "rollouts/", "verdict": "consistency/", "evidence": "evidence/"}


def resource_of(event: Event) -> str:
    """The resource that an event tells about, as the authorizer names it."""
    if event.kind == "version":
        model, _, label = event.key.partition("/")
        return f"models/{model}/versions/{label}"
    return PATHS[event.kind] + event.key


async def watch(service: Service, call: Call) -> Reply:
    member, query, caller = service.member, call.query, call.caller
    kinds = frozenset(query.resource)
    hub = member.watch
    position = hub.revision if query.from_revision is None else query.from_revision
    if position > max(hub.revision, member.state.revision):
        await service.reach(position)

    def wanted(event: Event) -> bool:
        if kinds and event.kind not in kinds:
            return False
        try:
            member.authorizer.require(caller, "read", resource_of(event))
        except RaftmetaError:
            return False
        return True

    subscription = hub.subscribe(position, wanted)
    return Reply(
        status=200,
        content_type=b"text/event-stream",
        revision=position,
        generation=member.state.generation,
        stream=WatchStream(service, subscription, lambda: reidentify(member.authorizer, call.headers)).send,
    )


_EXAMPLE = (
    'id: 42\nevent: change\ndata: {"revision":42,"events":[{"kind":"rollout","key":"r-255567b8d3fdb7c3","op":"put","value":{}}]}\n\n'
    'id: 44\nevent: bookmark\ndata: {"revision":44}\n\n'
)

OPERATIONS = (
    Operation(
        id="watch",
        method="GET",
        path="/v1/watch",
        kind=Kind.DIRECT,
        action="watch",
        what="Follow every change above a revision, in order and without gaps",
        handler=watch,
        answers=(
            Answer(
                200,
                None,
                _EXAMPLE,
                "One `change` per revision with all its events; a `bookmark` says that every event up to its revision was sent; "
                "`compacted` ends the stream when the watcher fell behind what is retained",
                media="text/event-stream",
            ),
        ),
        errors=("compacted", "too_many_watchers", "revision_not_reached"),
        extra_query=("from_revision", "resource"),
    ),
)
