from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.check_stub import serving_fleet
from tests.support.fake_fleet import FakeFleet
from tests.support.stub_http import StubServer


@pytest.fixture
def stub(fleet: FakeFleet) -> Iterator[StubServer]:
    """Members and nodes over HTTP, as the `fleet` of the file has them."""
    with serving_fleet(fleet) as server:
        yield server


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where checks of one user meet: of each test its own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
