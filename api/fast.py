"""The thin layer in front: hot operations go straight to `dispatch`, everything else to the FastAPI application.

FastAPI's routing and its dependency machinery cost about eight times what a hot handler costs. This layer looks at method and path only; a
path that is not hot, or does not match exactly, falls through, so removing the layer changes the speed of the API and nothing else (a test
runs without it).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from api.dispatch import serve
from api.operation import Operation, Receive, Send
from api.service import Service

_Row = tuple[Callable[[str], re.Match[str] | None], tuple[str, ...], Operation]  # match of a whole path, its parameters, operation


class FastLayer:
    """An ASGI application around another one."""

    def __init__(self, inner: Any, service: Service, operations: Iterable[Operation]) -> None:
        self._inner = inner
        self._service = service
        self._rows: dict[tuple[str, int], list[_Row]] = {}
        for operation in operations:
            if operation.hot:
                self._rows.setdefault((operation.method, operation.path.count("/")), []).append(_row(operation))

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            for match, names, operation in self._rows.get((scope["method"], path.count("/")), ()):
                found = match(path)
                if found is not None:
                    params = dict(zip(names, found.groups(), strict=True))
                    await serve(self._service, operation, params, (scope, receive, send))
                    return
        await self._inner(scope, receive, send)


def _row(operation: Operation) -> _Row:
    pattern = re.sub(r"\\{\w+\\}", "([^/]+)", re.escape(operation.path))
    return re.compile(pattern, re.DOTALL).fullmatch, tuple(re.findall(r"{(\w+)}", operation.path)), operation
