"""Questions about a state: single records, pages in order, what served when. Pure.

Answers are JSON-ready dictionaries whose fields have the names of `types.py`; a version has its summary's fields flattened in. Pages walk
the ordered sequences of the state, so a page costs its own length wherever it begins. What does not exist is RaftmetaError with the code
of the resource.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from enum import Enum
from heapq import merge
from itertools import islice
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import msgspec

from raftmeta.core.errors import RaftmetaError
from raftmeta.core.events import Event, Value
from raftmeta.core.rollout import sides, waiting_for
from raftmeta.core.state import State, version_key
from raftmeta.core.types import Deployment, ModelRecord, Phase, Record, Rollout, RolloutStatus, Verdict, VersionRecord

MAX_LIMIT = 1_000
_PLAIN = frozenset((str, int, type(None)))

Resource = dict[str, Any]  # of JSON values


class Page(NamedTuple):
    items: list[Resource]
    next: str | None  # cursor for `after`, None on the last page


class Served(NamedTuple):
    """What a deployment served at a time; `version` is "" when nothing had been activated yet."""

    version: str
    rollout_id: str  # that brought it, "" when that rollout is no longer kept or none did
    since_ms: int | None  # None when that is no longer known
    until_ms: int | None  # None while it serves


def find_model(state: State, name: str) -> ModelRecord:
    model = state.models.get(name)
    if model is None:
        raise RaftmetaError("unknown_model", f"no model {name[:128]!r}")
    return model


def find_version(state: State, model: str, label: str) -> VersionRecord:
    find_model(state, model)
    version = state.versions.get(version_key(model, label))
    if version is None:
        raise RaftmetaError("unknown_version", f"model {model!r} has no version {label[:128]!r}")
    return version


def find_manifest(state: State, model: str, label: str) -> bytes:
    """The packed manifest of a version."""
    find_version(state, model, label)
    return state.manifests[version_key(model, label)]


def find_deployment(state: State, name: str) -> Deployment:
    deployment = state.deployments.get(name)
    if deployment is None:
        raise RaftmetaError("unknown_deployment", f"no deployment {name[:128]!r}")
    return deployment


def find_rollout(state: State, rollout_id: str) -> Rollout:
    rollout = state.rollouts.get(rollout_id)
    if rollout is None:
        raise RaftmetaError("unknown_rollout", f"no rollout {rollout_id[:128]!r}")
    return rollout


def running_rollouts(state: State) -> Iterator[Rollout]:
    """In order of deployment."""
    found = (_running(state, state.deployments[name]) for name in state.deployment_names)
    return (rollout for rollout in found if rollout is not None)


def models_page(state: State, limit: int, after: str | None = None) -> Page:
    """Models by name; the cursor is a name, which need not exist any more."""
    names = list(islice(state.model_names.after(after), _limit(limit) + 1))
    return _page([resource(state.models[name]) for name in names[:limit]], names, limit)


def versions_page(state: State, model: str, limit: int, after: str | None = None) -> Page:
    """Versions of a model by number, the oldest first; the cursor is a number."""
    find_model(state, model)
    start = None if after is None else (_number(after) + 1,)
    keys = list(islice(state.versions_of(model).after(start), _limit(limit) + 1))
    items = [resource(state.versions[version_key(model, label)]) for _, label, _ in keys[: _limit(limit)]]
    return _page(items, [str(number) for number, _, _ in keys], limit)


def deployments_page(state: State, limit: int, after: str | None = None) -> Page:
    """Deployments by name; the cursor is a name."""
    names = list(islice(state.deployment_names.after(after), _limit(limit) + 1))
    return _page([deployment_resource(state, state.deployments[name]) for name in names[:limit]], names, limit)


def rollouts_page(state: State, deployment: str, limit: int, after: str | None = None) -> Page:
    """Kept rollouts of a deployment, the newest first; the cursor is an id."""
    find_deployment(state, deployment)
    ids = list(reversed(state.history.get(deployment) or ()))
    if after is not None:
        if after not in ids:
            raise RaftmetaError("unknown_rollout", f"no rollout {after[:128]!r} of deployment {deployment!r} to go on after")
        ids = ids[ids.index(after) + 1 :]
    ids = ids[: _limit(limit) + 1]
    return _page([resource(state.rollouts[rollout_id]) for rollout_id in ids[:limit]], ids, limit)


def verdicts_page(state: State, limit: int, after: str | None = None, deployment: str | None = None) -> Page:
    """The last verdict of every deployment that has one, or of this one, by name of the deployment."""
    if deployment is not None:
        find_deployment(state, deployment)
        found = iter((deployment,) if deployment in state.verdicts and (after is None or deployment > after) else ())
    else:
        found = (name for name in state.deployment_names.after(after) if name in state.verdicts)
    names = list(islice(found, _limit(limit) + 1))
    return _page([resource(state.verdicts[name]) for name in names[:limit]], names, limit)


class VerdictsPage(NamedTuple):
    page: Page
    dropped_revision: int  # of the newest among those asked for that is not kept any more, 0 when all are


def verdicts_since(state: State, since: int, limit: int, after: str | None = None, deployment: str | None = None) -> VerdictsPage:
    """Verdicts recorded after revision `since` that are kept, by revision; the cursor is a revision. Only a last one has its report."""
    if deployment is not None:
        find_deployment(state, deployment)
    names = [name for name in ((deployment,) if deployment is not None else state.deployment_names) if name in state.verdicts]
    start = since if after is None else max(since, _number(after))
    kept = merge(*(_verdicts_after(state, name, start) for name in names), key=itemgetter("revision"))
    items = list(islice(kept, _limit(limit) + 1))
    dropped = max((state.past_verdicts[name].dropped_revision for name in names if name in state.past_verdicts), default=0)
    page = _page(items[:limit], [str(item["revision"]) for item in items], limit)
    return VerdictsPage(page, dropped if dropped > since else 0)


def _verdicts_after(state: State, name: str, revision: int) -> Iterator[Resource]:
    past = state.past_verdicts.get(name)
    if past is not None:
        for item in past.items[bisect_right(past.items, revision, key=attrgetter("revision")) :]:
            yield {"deployment": name, **_json_value(item), "report": None}
    last = state.verdicts[name]
    if last.revision > revision:
        yield resource(last)


def deployment_resource(state: State, deployment: Deployment) -> Resource:
    """The record with the version that was decided, where its rollout stands and which nodes it waits for."""
    decided = state.versions.get(version_key(deployment.model, deployment.version))
    shown = resource(deployment) | {"serving": None if decided is None else resource(decided)}
    rollout = _running(state, deployment)
    if rollout is None:
        return shown | {"phase": Phase.IDLE.value, "target": deployment.version, "waiting_for": []}
    return shown | {"phase": rollout.phase.value, "target": rollout.to_version, "waiting_for": waiting_for(rollout, deployment)}


def deployments_of_node(state: State, node: str) -> list[Deployment]:
    """Deployments that name the node on one of their sides, in order."""
    every = (state.deployments[name] for name in state.deployment_names)
    return [deployment for deployment in every if node in sides(deployment)]


def served_at(state: State, name: str, at_ms: int) -> Served:
    """What a deployment served at a time, from the switch orders of its kept rollouts.

    Raises `compacted` for a time before the oldest kept rollout began, when older ones were dropped.
    """
    deployment = find_deployment(state, name)
    kept = [state.rollouts[rollout_id] for rollout_id in state.history.get(name) or ()]
    switched = [rollout for rollout in kept if rollout.switched_revision]
    for rollout, following in zip(reversed(switched), [None, *reversed(switched)], strict=False):
        if rollout.switched_ms <= at_ms:
            until = None if following is None else following.switched_ms
            return Served(rollout.to_version, rollout.id, rollout.switched_ms, until)
    before = kept[0].from_version if kept else deployment.version
    if before and at_ms < kept[0].started_ms:
        raise RaftmetaError("compacted", f"deployment {name!r}: nothing is kept of the time before {kept[0].started_ms}")
    return Served(before, "", None, switched[0].switched_ms if switched else None)


def event_resource(event: Event) -> Resource:
    """An event as the watch sends it."""
    value = None if event.value is None else resource(event.value)
    return {"kind": event.kind, "key": event.key, "op": event.op, "value": value}


def resource(record: Value) -> Resource:
    """A record as REST shows it."""
    shown: Resource = _json_value(record)
    if isinstance(record, VersionRecord):
        shown |= shown.pop("summary")
    if isinstance(record, Verdict):
        shown["report"] = _report(record.report)
    return shown


def _running(state: State, deployment: Deployment) -> Rollout | None:
    rollout = state.rollouts.get(deployment.rollout_id)
    return rollout if rollout is not None and rollout.status is RolloutStatus.RUNNING else None


def _json_value(value: object) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Record):
        return {field: _json_value(each) for field, each in msgspec.structs.asdict(value).items()}
    if isinstance(value, tuple):
        return [_json_value(each) for each in value]
    return value.value if isinstance(value, Enum) else value


def _report(report: bytes) -> Any:
    """The checker's JSON; its text when it is none."""
    try:
        return msgspec.json.decode(report)
    except (msgspec.MsgspecError, RecursionError):
        return report.decode("utf-8", "replace")


def _page(items: list[Resource], cursors: list[str], limit: int) -> Page:
    """`cursors` are those of the items and of one more if there is one."""
    return Page(items, cursors[limit - 1] if len(cursors) > limit else None)


def _limit(limit: int) -> int:
    if not 1 <= limit <= MAX_LIMIT:
        raise RaftmetaError("bad_field", f"limit is {limit}, expected 1..{MAX_LIMIT}")
    return limit


def _number(cursor: str) -> int:
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) <= 19):
        raise RaftmetaError("bad_field", f"the cursor {cursor[:40]!r} is no number")
    return int(cursor)
