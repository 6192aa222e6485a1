"""The API holds no more connections than leave the log its descriptors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from api.descriptors import MIN_CONNECTIONS, RESERVE

OTHERS = 10


def allowed(soft: int, hard: int, wanted: int) -> str:
    """What a process with these limits allows, and its soft limit afterwards; or why it refuses."""
    code = f"""
import resource
from api.descriptors import connections_allowed
from raftmeta.core.errors import RaftmetaError
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
try:
    print(connections_allowed({wanted}, {OTHERS}), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except RaftmetaError as error:
    print(error.code, error.detail)
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1_024, 1_024, (500, 1_024)),
        (600, 2_000, (500, 500 + RESERVE + OTHERS)),
        (600, 650, (650 - RESERVE - OTHERS, 650)),
        (256, 256, (256 - RESERVE - OTHERS, 256)),
    ],
    ids=["enough", "raised", "raised, and fewer", "fewer"],
)
def test_the_limit_is_raised_as_far_as_it_may_and_connections_give_way_to_what_the_log_needs(
    soft: int, hard: int, expected: tuple[int, int]
) -> None:
    assert allowed(soft, hard, 500) == f"{expected[0]} {expected[1]}"


def test_a_limit_that_leaves_hardly_a_connection_is_refused_with_what_helps() -> None:
    said = allowed(200, 200, 500)
    assert said.startswith("bad_field")
    assert f"at least {RESERVE + OTHERS + MIN_CONNECTIONS}" in said and "ulimit -n" in said
