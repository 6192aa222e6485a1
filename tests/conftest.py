"""For every test: no pickle is read, and Hypothesis is steady on a slow shared machine."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.support.no_pickle import forbid_pickle

forbid_pickle()

settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("steady")
