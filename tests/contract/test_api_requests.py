"""The API against its own document: requests that fit it and such that do not, a bounded number for each operation, on a real socket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import content_type_conformance, response_headers_conformance, response_schema_conformance
from schemathesis.specs.openapi.checks import status_code_conformance

from api.routes import OPERATIONS
from api.service import ApiLimits
from tests.support.api_server import Running, declare, running

CHECKS = (content_type_conformance, response_headers_conformance, response_schema_conformance, status_code_conformance)
EXAMPLES = 4  # for each operation and mode; making them takes far longer than answering


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(api_limits=ApiLimits(revision_wait_s=0.01), prepare=declare) as made:
        yield made


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["fitting", "unfitting"])
def test_the_server_answers_any_request_as_the_document_says(server: Running, mode: GenerationMode) -> None:
    """A bounded number of requests for each operation, made from the document or against it."""
    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")
    seen: set[str] = set()
    for found in schema.exclude(path="/v1/watch").get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body and not operation.query:
            continue

        @settings(max_examples=EXAMPLES, phases=[Phase.generate], deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def probe(case: schemathesis.Case) -> None:
            response = case.call()
            seen.add(f"{case.method} {case.path}")
            assert response.status_code != 500, response.text
            case.validate_response(response, checks=CHECKS)

        probe()
    assert len(seen) > len(OPERATIONS) // 2
    assert server.works()
