"""The ASGI application of one member: the thin layer around a FastAPI application, both made from the table of operations."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from functools import cache
from importlib import metadata
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from api import docs_page, errors, openapi
from api.dispatch import serve
from api.fast import FastLayer
from api.operation import Operation
from api.routes import OPERATIONS
from api.service import Service
from raftmeta.core.errors import RaftmetaError


def build(service: Service) -> FastLayer:
    """The whole API of this member."""
    return FastLayer(build_inner(service), service, OPERATIONS)


def build_inner(service: Service) -> FastAPI:
    """Every operation without the thin layer, and the documents."""
    app = FastAPI(title="raftmeta", openapi_url="/openapi.json", docs_url=None, redoc_url=None, redirect_slashes=False)
    for operation in OPERATIONS:
        app.add_api_route(
            operation.path,
            _endpoint(service, operation),
            methods=[operation.method],
            operation_id=operation.id,
            response_model=None,
        )
    app.openapi = document  # type: ignore[method-assign]
    app.add_api_route("/docs", _docs, methods=["GET"], response_model=None)
    app.add_exception_handler(HTTPException, _refuse(service))
    return app


@cache
def document() -> dict[str, Any]:
    return openapi.document(OPERATIONS, metadata.version("raftmeta"))


@cache
def _page() -> str:
    return docs_page.render(document())


async def _docs() -> Response:
    return Response(_page(), headers=docs_page.HEADERS, media_type="text/html")


class _Served(Response):
    """Hands the request on to `dispatch`, which sends the reply itself."""

    def __init__(self, service: Service, operation: Operation, params: Mapping[str, str]) -> None:
        super().__init__()
        self._serve = service, operation, params

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        service, operation, params = self._serve
        await serve(service, operation, params, (scope, receive, send))


def _endpoint(service: Service, operation: Operation) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def endpoint(request: Request) -> Response:
        return _Served(service, operation, request.path_params)

    return endpoint


def _refuse(service: Service) -> Callable[[Request, Exception], Coroutine[Any, Any, Response]]:
    """What the router refuses (no such path, no such method), as problems."""

    async def refuse(request: Request, cause: Exception) -> Response:
        assert isinstance(cause, HTTPException)
        path, headers = request.url.path, {}
        if cause.status_code == 405:
            allowed = sorted({operation.method for operation in OPERATIONS if _matches(operation.path, path)})
            error = RaftmetaError("method_not_allowed", f"{path[:200]} takes {', '.join(allowed) or 'GET'}, found {request.method}")
            headers["allow"] = ", ".join(allowed) or "GET"
        elif cause.status_code == 404:
            error = RaftmetaError("not_found", f"no resource {path[:200]!r}; /openapi.json lists them")
        else:
            error = RaftmetaError("bad_request", str(cause.detail)[:200])
        service.stats.problem(error.code)
        service.stats.observe("unmatched", "any", error.info.status, 0.0)
        reply, state = errors.to_reply(error), service.member.state
        headers["x-raftmeta-revision"], headers["x-raftmeta-generation"] = str(state.revision), str(state.generation)
        return Response(reply.body, reply.status, headers, media_type=reply.content_type.decode("ascii"))

    return refuse


def _matches(template: str, path: str) -> bool:
    parts, given = template.split("/"), path.split("/")
    return len(parts) == len(given) and all(part.startswith("{") or part == at for part, at in zip(parts, given, strict=True))
