"""The thin layer in front: hot operations go straight to `dispatch`, everything else to the FastAPI application.

FastAPI's routing and its dependency machinery cost about eight times what a hot handler costs. This layer looks at method and path only; a
path that is not hot, or does not match exactly, falls through, so removing the layer changes the speed of the API and nothing else (a test
runs without it).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from api.dispatch import serve
from api.operation import Operation, Receive, Send
from api.service import Service

_Row = tuple[tuple[tuple[int, str], ...], tuple[tuple[int, str], ...], Operation]  # fixed segments, parameters, operation


class FastLayer:
    """An ASGI application around another one."""

    def __init__(self, inner: Any, service: Service, operations: Iterable[Operation]) -> None:
        self._inner = inner
        self._service = service
        self._rows: dict[tuple[str, int], list[_Row]] = {}
        for operation in operations:
            if operation.hot:
                row = _row(operation)
                self._rows.setdefault((operation.method, operation.path.count("/")), []).append(row)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            rows = self._rows.get((scope["method"], path.count("/")))
            if rows:
                parts = path.split("/")
                for fixed, named, operation in rows:
                    if all(parts[at] == text for at, text in fixed) and all(parts[at] for at, _ in named):
                        params = {name: parts[at] for at, name in named}
                        await serve(self._service, operation, params, (scope, receive, send))
                        return
        await self._inner(scope, receive, send)


def _row(operation: Operation) -> _Row:
    parts = list(enumerate(operation.path.split("/")))
    named = tuple((at, part[1:-1]) for at, part in parts if part.startswith("{"))
    fixed = tuple((at, part) for at, part in parts if not part.startswith("{"))
    return fixed, named, operation
