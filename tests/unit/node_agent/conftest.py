from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.shm import shm_directory


@pytest.fixture
def shm() -> Iterator[Path]:
    with shm_directory() as directory:
        yield directory
