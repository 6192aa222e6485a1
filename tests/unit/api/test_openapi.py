"""The document: complete, true to what the server does, and every example in it really works."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from api import app, openapi
from api.routes import OPERATIONS
from raftmeta.core.errors import CODES
from tests.unit.api.harness import api, run


def test_every_operation_is_in_the_document_with_an_example_of_each_body_and_answer() -> None:
    paths = app.document()["paths"]
    assert sorted((path, method) for path, item in paths.items() for method in item) == sorted(
        (operation.path, operation.method.lower()) for operation in OPERATIONS
    )
    for operation in OPERATIONS:
        shown = paths[operation.path][operation.method.lower()]
        assert shown["operationId"] == operation.id
        if operation.body is not None:
            assert shown["requestBody"]["content"]["application/json"]["example"] == operation.example
        for answer in operation.answers:
            (content,) = shown["responses"][str(answer.status)]["content"].values()
            assert content["example"] == answer.example


def test_the_example_of_every_body_is_accepted_and_that_of_every_answer_fits_its_shape() -> None:
    for operation in OPERATIONS:
        if operation.body is not None:
            operation.body.decode(msgspec.json.encode(operation.example))
        for answer in operation.answers:
            if answer.shape is not None:
                made = msgspec.convert(answer.example, answer.shape)
                assert msgspec.json.decode(msgspec.json.encode(made)) == answer.example, operation.id


def test_every_error_that_an_operation_names_exists_and_every_code_is_used_or_known_to_be_internal() -> None:
    used = {code for operation in OPERATIONS for code in openapi.codes_of(operation)} | {"not_found", "method_not_allowed"}
    assert used <= set(CODES)
    unused = set(CODES) - used
    assert unused == {
        "gate_not_met",  # of the controller's own commands
        "feature_level_unsupported",
        "directory_refused",
        "starting",  # readiness shows it without a code
        "integrity",  # ends the process
    }


def test_every_code_has_an_example_and_references_lead_somewhere() -> None:
    document = app.document()
    assert set(document["components"]["examples"]) == set(CODES)
    for reference in references(document):
        node: Any = document
        for step in reference.removeprefix("#/").split("/"):
            node = node[step]


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref":
                yield value
            else:
                yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_patterns_are_those_of_json_schema() -> None:
    text = msgspec.json.encode(app.document()).decode()
    assert r"\\Z" not in text
    assert re.search(r'"pattern":"\^\[a-z0-9\]', text)


def test_the_documents_are_served() -> None:
    async def work() -> None:
        async with api() as made:
            assert (await made.client.get("/openapi.json")).json() == msgspec.json.decode(msgspec.json.encode(app.document()))
            assert "swagger" in (await made.client.get("/docs")).text

    run(work())
