"""The document: complete, true to what the server does, and every example in it really works."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import msgspec

from api import app, docs_page, openapi
from api.routes import OPERATIONS
from api.schemas import examples
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
        "directory_refused",
        "agent_unreachable",  # of the command line on a node
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
            page = await made.client.get("/docs")
            assert page.text == docs_page.render(app.document())
            assert "default-src 'none'" in page.headers["content-security-policy"]

    run(work())


class Page(HTMLParser):
    """What a browser would load from a page, what it holds, and whether its elements close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.targets: list[str] = []
        self.ids: set[str] = set()
        self.text = ""
        self.blocks: list[str] = []  # of preformatted text
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        given = dict(attrs)
        assert not set(given) - {"lang", "charset", "name", "content", "class", "id", "href"}, given
        self.targets += [given["href"] or ""] if "href" in given else []
        self.ids |= {given["id"] or ""} if "id" in given else set()
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open and self._open[-1] == "pre":
            self.blocks.append(data)


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    page = Page(docs_page.render(app.document()))
    assert not page.names & {"script", "link", "img", "iframe", "object", "embed", "form", "base"}
    assert "url(" not in page.text and "@import" not in page.text
    assert {target for target in page.targets if not target.startswith("#")} == {"/openapi.json"}
    assert {target[1:] for target in page.targets if target.startswith("#")} <= page.ids


def test_the_page_shows_every_operation_with_its_parameters_and_examples() -> None:
    text = Page(docs_page.render(app.document())).text
    for operation in OPERATIONS:
        assert operation.path in text and operation.what in text
        shown = [*(answer.example for answer in operation.answers), *([operation.example] if operation.body else [])]
        for example in shown:
            assert (example if isinstance(example, str) else json.dumps(example, ensure_ascii=False, indent=2)) in text
        for name in openapi.parameters_of(operation):
            assert name in text
    assert all(code in text for code in CODES)


def test_each_call_of_the_page_can_be_pasted_into_a_shell() -> None:
    calls = [shlex.split(block) for block in Page(docs_page.render(app.document())).blocks if block.startswith("curl ")]
    assert len(calls) == len(OPERATIONS)
    bodies = [json.loads(words[words.index("-d") + 1]) for words in calls if "-d" in words]
    for operation in OPERATIONS:
        path = operation.path.format(**examples.PATH)
        assert sum(words[2:4] == [operation.method, f"$URL{path}"] for words in calls) == 1
        assert operation.body is None or operation.example in bodies


def test_what_stands_in_the_document_cannot_become_markup() -> None:
    document = json.loads(json.dumps(app.document()))
    for item in document["paths"].values():
        for shown in item.values():
            shown["summary"] = "<script>alert('x')</script>"
            for answer in shown["responses"].values():
                answer["description"] = '"><img src="https://h/">'
    page = Page(docs_page.render(document))
    assert "script" not in page.names and "img" not in page.names and "alert('x')" in page.text
