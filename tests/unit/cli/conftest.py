from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stub_http import StubServer, stub_server


@pytest.fixture
def member() -> Iterator[StubServer]:
    """That knows no route until a test gives it one."""
    with stub_server({}) as stub:
        yield stub
