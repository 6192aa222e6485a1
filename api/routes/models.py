"""Models: they come into being with their first version."""

from __future__ import annotations

from api import replies
from api.operation import Answer, Call, Kind, Operation, Reply
from api.schemas import answers, examples, records
from api.service import Service
from raftmeta.core import queries


async def list_models(service: Service, call: Call) -> Reply:
    state = await service.view(call)
    return replies.page(state, queries.models_page(state, call.query.limit, call.query.after))


async def get_model(service: Service, call: Call) -> Reply:
    state = await service.view(call)
    return replies.at(state, records.model(queries.find_model(state, call.params["model"])))


OPERATIONS = (
    Operation(
        id="list_models",
        method="GET",
        path="/v1/models",
        kind=Kind.LIST,
        action="read",
        what="List the models by name",
        handler=list_models,
        answers=(Answer(200, answers.ModelPage, {"items": [examples.MODEL], "next": None}, "One page"),),
        errors=(),
    ),
    Operation(
        id="get_model",
        method="GET",
        path="/v1/models/{model}",
        kind=Kind.READ,
        action="read",
        what="Look at one model",
        handler=get_model,
        answers=(Answer(200, records.Model, examples.MODEL, "The model"),),
        errors=("unknown_model",),
    ),
)
