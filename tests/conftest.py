"""For every test: no pickle is read, Hypothesis is steady on a slow shared machine, and clocks that were replaced are given back."""

from __future__ import annotations

from collections.abc import Iterator

import pysyncobj.syncobj
import pytest
from hypothesis import HealthCheck, settings

from tests.support.no_pickle import forbid_pickle

forbid_pickle()

settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("steady")


@pytest.fixture(autouse=True)
def library_clock_is_given_back() -> Iterator[None]:
    """The simulation and its kin replace the clock of the library behind the wall; the next test finds the real one again."""
    clock = pysyncobj.syncobj.monotonicTime
    yield
    pysyncobj.syncobj.monotonicTime = clock
