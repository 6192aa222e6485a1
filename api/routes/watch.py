"""The watch: one stream of server-sent events per watcher."""

from __future__ import annotations

from api.auth import reidentify
from api.operation import Answer, Call, Kind, Operation, Reply
from api.service import Service
from api.stream import WatchStream
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.events import Event
from raftmeta.security.roles import Principal

ACTION = RESOURCE = "watch"  # as the authorizer names them
PATHS = {"model": "models/", "deployment": "deployments/", "rollout": "rollouts/", "verdict": "consistency/", "evidence": "evidence/"}


def resource_of(event: Event) -> str:
    """The resource that an event tells about, as the authorizer names it."""
    if event.kind == "version":
        model, _, label = event.key.partition("/")
        return f"models/{model}/versions/{label}"
    return PATHS[event.kind] + event.key


class Watcher:
    """Whose watch it is, by what the member knows of the caller now: the role may change while the watch is open."""

    def __init__(self, service: Service, call: Call) -> None:
        self._authorizer, self._headers = service.member.authorizer, call.headers
        self._kinds = frozenset(call.query.resource)
        self._caller: Principal = call.caller

    def recheck(self) -> None:
        """Raises RaftmetaError unauthenticated or forbidden once the caller may not go on."""
        caller = reidentify(self._authorizer, self._headers)
        self._authorizer.require(caller, ACTION, RESOURCE)
        self._caller = caller

    def wants(self, event: Event) -> bool:
        if self._kinds and event.kind not in self._kinds:
            return False
        try:
            self._authorizer.require(self._caller, "read", resource_of(event))
        except RaftmetaError:
            return False
        return True


async def watch(service: Service, call: Call) -> Reply:
    member, query = service.member, call.query
    service.refuse_unsound()
    hub = member.watch
    position = hub.revision if query.from_revision is None else query.from_revision
    if position > max(hub.revision, member.state.revision):
        await service.reach(position)
    watcher = Watcher(service, call)
    subscription = hub.subscribe(position, watcher.wants)
    try:
        service.refuse_unsound()  # what makes a member unsound from here on ends this subscription
    except RaftmetaError:
        with subscription:
            raise
    return Reply(
        status=200,
        content_type=b"text/event-stream",
        revision=position,
        generation=member.state.generation,
        stream=WatchStream(service, subscription, watcher.recheck).send,
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
        action=ACTION,
        what="Follow every change above a revision, in order and without gaps",
        handler=watch,
        answers=(
            Answer(
                200,
                None,
                _EXAMPLE,
                "One `change` per revision with all its events; a `bookmark` says that every event up to its revision was sent; "
                "`compacted` ends the stream when the watcher fell behind what is retained, or when a majority has another state than this "
                "member: list again",
                media="text/event-stream",
            ),
        ),
        errors=("compacted", "too_many_watchers", "revision_not_reached"),
        extra_query=("from_revision", "resource"),
    ),
)
