"""The page at /docs: the document as one HTML page that asks nobody for anything. Pure.

It works where no browser reaches the internet, and a member's page runs no script of a third party: it has no script at all, its style
stands in it, and `HEADERS` tell the browser to load nothing else. Schemas in full are at /openapi.json; here is what one reads first: what
can be called, with which parameters, and an example to send.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882 }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 3rem; border-bottom: 1px solid var(--line) }
section { margin: 2rem 0; padding-left: 1rem; border-left: 3px solid var(--line) }
section:target { border-left-color: currentcolor }
h3 { margin: 0; font-size: 1.05rem }
code, pre, .path { font-family: ui-monospace, monospace; font-size: .9rem }
pre { overflow-x: auto; padding: .75rem; background: var(--soft); border-radius: 4px }
.method { display: inline-block; min-width: 4rem; font-weight: 700 }
nav li { list-style: none }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line) }
summary { cursor: pointer }
"""


def render(document: dict[str, Any]) -> str:
    """The page of an OpenAPI document as `api.openapi` makes it."""
    info = document["info"]
    operations = [(path, method, shown) for path, item in document["paths"].items() for method, shown in item.items()]
    tags = list(dict.fromkeys(shown["tags"][0] for _, _, shown in operations))
    title = f"{info['title']} {info['version']}"
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>',
        f"<h1>{escape(title)}</h1><p>{escape(info['description'])}</p>",
        '<p>The same as data, with every schema: <a href="/openapi.json">/openapi.json</a>. A call with a token carries ',
        "<code>Authorization: Bearer TOKEN</code>; the examples take both from the variables <code>URL</code> and <code>TOKEN</code>.</p>",
    ]
    for tag in tags:
        rows = [row for row in operations if row[2]["tags"][0] == tag]
        parts += [f"<h2>{escape(tag)}</h2><nav><ul>", *(_entry(*row) for row in rows), "</ul></nav>"]
        for row in rows:
            parts += _operation(*row)
    parts += ["<h2>errors</h2>", *_errors(document["components"]["examples"]), "</body></html>"]
    return "".join(parts)


def _entry(path: str, method: str, shown: dict[str, Any]) -> str:
    return f'<li><a href="#{escape(shown["operationId"])}">{_call(path, method)}</a> {escape(shown["summary"])}</li>'


def _call(path: str, method: str) -> str:
    return f'<span class="method">{escape(method.upper())}</span> <span class="path">{escape(path)}</span>'


def _operation(path: str, method: str, shown: dict[str, Any]) -> Iterator[str]:
    yield f'<section id="{escape(shown["operationId"])}"><h3>{_call(path, method)}</h3><p>{escape(shown["summary"])}.</p>'
    if shown["parameters"]:
        yield _table(("parameter", "in", "value", ""), [_parameter(one) for one in shown["parameters"]])
    yield f"<pre>{escape(_curl(path, method, shown))}</pre>"
    for status, answer in shown["responses"].items():
        yield from _answer(status, answer)
    yield "</section>"


def _parameter(one: dict[str, Any]) -> tuple[str, str, str, str]:
    what = one.get("description", "")
    return one["name"], one["in"] + (", required" if one["required"] else ""), _value(one["schema"]), what


def _value(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        words = [" | ".join(schema["enum"])]
    else:
        words = [schema["type"]]
        if "minimum" in schema:
            words.append(f"from {schema['minimum']}")
        if "maximum" in schema:
            words.append(f"to {schema['maximum']}")
        if "pattern" in schema:
            words.append(schema["pattern"])
    if "default" in schema:
        words.append(f"({json.dumps(schema['default'])} by default)")
    return " ".join(words)


def _curl(path: str, method: str, shown: dict[str, Any]) -> str:
    """One line per part, as it can be pasted into a shell."""
    named = {one["name"]: one["example"] for one in shown["parameters"] if one["in"] == "path"}
    lines = [f'curl -X {method.upper()} "$URL{path.format(**named)}"']
    if shown.get("security") != []:
        lines.append('-H "Authorization: Bearer $TOKEN"')
    if "requestBody" in shown:
        body = json.dumps(shown["requestBody"]["content"]["application/json"]["example"], ensure_ascii=False, indent=2)
        lines += ["-H 'Content-Type: application/json'", "-d '" + body.replace("'", "'\\''") + "'"]
    return " \\\n  ".join(lines)


def _answer(status: str, answer: dict[str, Any]) -> Iterator[str]:
    (content,) = answer["content"].values()
    if "examples" in content:
        codes = ", ".join(f'<a href="#{escape(code)}"><code>{escape(code)}</code></a>' for code in content["examples"])
        yield f"<p>{escape(status)}: {codes}</p>"
        return
    example = content["example"]
    text = example if isinstance(example, str) else json.dumps(example, ensure_ascii=False, indent=2)
    yield f"<details><summary>{escape(status)}: {escape(answer['description'])}</summary><pre>{escape(text)}</pre></details>"


def _errors(examples: dict[str, Any]) -> Iterator[str]:
    yield "<p>Every error is a problem document (RFC 9457). Its <code>class</code> says what to do next.</p><table>"
    yield "<tr><th>code</th><th>status</th><th>class</th><th></th></tr>"
    for code, example in examples.items():
        problem = example["value"]
        cells = "".join(f"<td>{escape(str(problem[name]))}</td>" for name in ("status", "class", "title"))
        yield f'<tr id="{escape(code)}"><td><code>{escape(code)}</code></td>{cells}</tr>'
    yield "</table>"


def _table(head: tuple[str, ...], rows: list[tuple[str, str, str, str]]) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"]
    for row in rows:
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return f"<table>{''.join(lines)}</table>"
