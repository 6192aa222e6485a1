"""Routes, error codes and metric names are promises: they stand in a golden file, and a change takes a line in the CHANGELOG.

`python -m tests.contract.test_api_golden` writes the file anew; the difference then is what the CHANGELOG has to tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from api import metrics, openapi
from api.errors import problem
from api.metrics import RequestStats
from api.routes import OPERATIONS
from raftmeta import log
from raftmeta.core.errors import CODES
from tests.support.fake_log import FakeMember

GOLDEN = Path(__file__).parent / "golden" / "api.txt"
LOG = Path(log.__file__).parent


def lines() -> Iterator[str]:
    yield "# routes: method, path, operation, then query parameters, success statuses, error codes"
    for operation in sorted(OPERATIONS, key=lambda one: (one.path, one.method)):
        yield f"{operation.method} {operation.path} {operation.id}"
        yield f"    query {' '.join(sorted(openapi.parameters_of(operation))) or '-'}"
        yield f"    answers {' '.join(str(answer.status) for answer in operation.answers)}"
        yield f"    errors {' '.join(openapi.codes_of(operation))}"
    yield "# error codes: code, status, class, title"
    for code, info in sorted(CODES.items()):
        yield f"{code} {info.status} {info.error_class} {info.title}"
    yield "# members of a problem"
    yield " ".join(problem("internal", ""))
    yield "# metrics: name, type, labels"
    yield from sorted(_metrics())
    yield "# events of raftmeta_peer_events"
    yield " ".join(sorted((*metrics.PEER_EVENTS, metrics.OTHER)))


def _metrics() -> Iterator[str]:
    stats = RequestStats()
    stats.observe("/", "GET", 200, 0.1)
    stats.problem("internal")
    text = metrics.page(FakeMember(), stats).decode()
    for family in text_string_to_metric_families(text):
        labels = sorted({label for sample in family.samples for label in sample.labels})
        yield f"{family.name} {family.type} {' '.join(labels) or '-'}"


def test_routes_codes_and_metric_names_are_those_that_were_promised() -> None:
    assert "\n".join(lines()) + "\n" == GOLDEN.read_text(), "see the head of this file"


def test_no_label_of_a_metric_holds_a_name_or_a_version() -> None:
    allowed = {"route", "method", "status", "le", "code", "role", "event", "-"}
    for line in _metrics():
        assert set(line.split()[2:]) <= allowed, line


def test_every_event_that_the_links_count_is_a_label_that_was_promised() -> None:
    """Read from the sources, since most events take a broken peer to happen."""
    counted = re.compile(r"notices\.(?:count|warn|info)\(\s*(f?)\"([a-z_]+)")
    found = {match.groups() for path in LOG.glob("*.py") for match in counted.finditer(path.read_text())}
    assert ("f", "refused_") in found and len(found) > 9
    assert {name for made, name in found if not made} <= set(metrics.PEER_EVENTS)


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text("\n".join(lines()) + "\n")
