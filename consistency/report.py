"""A verdict as text for people and logs, and as JSON for programs. Pure: values in, lines out.

Text is plain ASCII apart from what names contain, at most 100 columns wide or as a narrower terminal is, and reads the same in a mail of
cron and in a file. Names come from other machines: control characters are escaped. The recorded form fits the limit of a verdict in
the log.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from consistency.findings import CONSISTENT, INCOMPLETE, Finding, NodeSummary, Verdict

WIDTH = 100
LEAST_WIDTH = 60  # of a report; what is narrower folds it
MAX_RECORD_BYTES = 48 << 10  # a verdict in the log may have 64 KiB of JSON; the rest is room for escapes
MAX_FINDINGS_SHOWN = 20
MAX_UNSEEN_SHOWN = 20
_SHORT = 12  # characters of a digest that people compare


def as_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict's fields by name."""
    made: dict[str, Any] = msgspec.to_builtins(verdict)
    return made


def recorded_as(verdict: Verdict) -> str:
    """In the log `consistent` says that every node was seen, because a fail-over relies on it: with a smaller quorum it is incomplete."""
    return INCOMPLETE if verdict.verdict == CONSISTENT and verdict.unseen else verdict.verdict


def for_record(verdict: Verdict) -> dict[str, Any]:
    """The same, with as many findings, then nodes, as fit into the log. `findings_total` and `nodes_total` keep the truth."""
    made = as_json(verdict) | {"verdict": recorded_as(verdict)}
    for part in ("findings", "nodes", "reasons", "unseen"):
        while made[part] and len(json.dumps(made)) > MAX_RECORD_BYTES:
            made[part] = made[part][: len(made[part]) // 2]
    return made


def as_text(verdict: Verdict, width: int = WIDTH) -> str:
    """The whole report, ending in a newline. `width`: columns, taken within bounds."""
    width = min(WIDTH, max(LEAST_WIDTH, width))
    parts = [_head(verdict, width), _figures(verdict, width), _nodes(verdict, width), _reasons(verdict, width), _findings(verdict, width)]
    return "\n\n".join("\n".join(lines) for part in parts if (lines := [line.rstrip() for line in part])) + "\n"


def summary(verdict: Verdict) -> str:
    """One line, for a list of deployments."""
    gap = f", {len(verdict.reasons)} not looked at" if verdict.reasons else ""
    unseen = f", {len(verdict.unseen)} unseen" if verdict.unseen else ""
    return (
        f"{verdict.verdict.upper():<10}  {_safe(verdict.deployment)}  {_version(verdict)}  {verdict.findings_total} findings{gap}{unseen}"
    )


def _head(verdict: Verdict, width: int) -> Iterator[str]:
    title = f"{_safe(verdict.deployment)}: {_version(verdict)}"
    word = verdict.verdict.upper() + (
        f" FOR {verdict.nodes_seen} OF {verdict.nodes_total} NODES" if verdict.unseen and verdict.verdict == CONSISTENT else ""
    )
    room = width - len(word) - 1
    yield f"{_cut(title, room):<{room}} {word}"
    yield "=" * width
    if verdict.checksum:
        digests = f"checksum {verdict.checksum[:_SHORT]}   vector root {verdict.vector_root[:_SHORT]}"
        yield _cut(_safe(f"{digests}   revision {verdict.revision}"), width)


def _figures(verdict: Verdict, width: int) -> Iterator[str]:
    ratio = verdict.mismatch_ratio
    rows = [
        ("", "PRIMARY", "STANDBY", "LIMIT"),
        ("nodes seen", _seen(verdict, "primary"), _seen(verdict, "standby"), verdict.limits.quorum),
        ("memory read", _oldest(verdict, "primary"), _oldest(verdict, "standby"), _age_limit(verdict)),
        ("active models", _number(verdict.models_primary), _number(verdict.models_standby), "as decided"),
        ("mean version lag", _ms(verdict.lag_ms_primary), _ms(verdict.lag_ms_standby), f"{verdict.limits.lag_ms:g} ms apart"),
        ("tensors different", _different(verdict, "primary"), _different(verdict, "standby"), "0"),
        ("share of tensors", "unknown" if ratio is None else f"{100 * ratio:.2f} %", "", "0.00 %"),
    ]
    yield from _columns(rows, (20, 26, 26, 20), width)


def _seen(verdict: Verdict, side: str) -> str:
    nodes = [node for node in verdict.nodes if node.side == side]
    return f"{sum(node.answered for node in nodes)} of {len(nodes)}" if nodes else "-"


def _oldest(verdict: Verdict, side: str) -> str:
    ages = [node.age_ms for node in verdict.nodes if node.side == side and node.answered]
    return f"{duration(max(ages))} ago" if ages else "-"


def _age_limit(verdict: Verdict) -> str:
    digests = ", SHA-256 too" if verdict.limits.deep else ""
    return ("for this check" if verdict.limits.max_age_ms is None else f"{duration(verdict.limits.max_age_ms)} ago") + digests


def duration(ms: int) -> str:
    """In the largest unit that keeps two digits."""
    for unit, size, next_size in (("ms", 1, 10_000), ("s", 1_000, 600_000), ("min", 60_000, 36_000_000)):
        if ms < next_size:
            return f"{ms // size} {unit}"
    return f"{ms // 3_600_000} h"


def _different(verdict: Verdict, side: str) -> str:
    """Of the node of the side that differs most."""
    told = [node for node in verdict.nodes if node.side == side and node.equal_to_manifest is not None]
    if verdict.mismatch_ratio is None or not told:
        return "unknown" if any(node.side == side for node in verdict.nodes) else "-"
    return f"{max(node.tensors_different for node in told)} of {verdict.tensors_total}"


def _nodes(verdict: Verdict, width: int) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("NODE", "SIDE", "ZONE", "VERSION", "SLOT", "VECTOR ROOT", "MEMORY")]
    rows += [_node_row(node) for node in verdict.nodes]
    if verdict.nodes:
        yield from _columns(rows, (20, 8, 12, 16, 5, _SHORT, 15), width)  # with their gaps exactly WIDTH


def _node_row(node: NodeSummary) -> tuple[str, ...]:
    where = (_safe(node.node), node.side, _safe(node.zone))
    if not node.answered:
        return (*where, "-", "-", "-", _safe(node.code) or "no answer")
    if node.equal_to_manifest is None:
        memory = "not compared"
    elif node.equal_to_manifest:
        memory = "as published"
    else:
        memory = f"{node.tensors_different} differ" if node.tensors_different else "differs"
    return (*where, _safe(node.version) or "-", _safe(str(node.slot)), _safe(node.vector_root[:_SHORT]), memory)


def _reasons(verdict: Verdict, width: int) -> Iterator[str]:
    for reason in verdict.reasons:
        where = f" {_safe(reason.node)}" if reason.node else ""
        yield from _wrapped(f"not looked at:{where} ({_safe(reason.code)}) {_safe(reason.detail)}", width)
    for reason in verdict.unseen[:MAX_UNSEEN_SHOWN]:
        yield from _wrapped(f"unseen, as the quorum allows: {_safe(reason.node)} ({_safe(reason.code)}) {_safe(reason.detail)}", width)
    if len(verdict.unseen) > MAX_UNSEEN_SHOWN:
        yield f"and {len(verdict.unseen) - MAX_UNSEEN_SHOWN} more unseen nodes"


def _findings(verdict: Verdict, width: int) -> Iterator[str]:
    for finding in verdict.findings[:MAX_FINDINGS_SHOWN]:
        yield from _wrapped(f"differs: {_place(finding)}", width)
        yield from _wrapped(f"    expected {_safe(finding.expected)}", width)
        yield from _wrapped(f"    found    {_safe(finding.found)}", width)
        if finding.detail:
            yield from _wrapped(f"    {_safe(finding.detail)}", width)
    hidden = verdict.findings_total - min(len(verdict.findings), MAX_FINDINGS_SHOWN)
    if hidden > 0:
        yield f"and {hidden} more findings; --json shows up to {max(len(verdict.findings), MAX_FINDINGS_SHOWN)}"


def _place(finding: Finding) -> str:
    parts = [f"node {_safe(finding.node)}"] if finding.node else ["both sides"]
    if finding.tensor:
        parts.append(f"tensor {_safe(finding.tensor)}")
    if finding.block >= 0:
        parts.append(f"block {finding.block}")
    return f"({finding.code}) {', '.join(parts)}"


def _version(verdict: Verdict) -> str:
    if not verdict.version:
        return f"model {_safe(verdict.model)}, nothing activated"
    return f"model {_safe(verdict.model)}, version {_safe(verdict.version)} (number {verdict.number})"


def _columns(rows: Sequence[Sequence[str]], widths: Sequence[int], limit: int) -> Iterator[str]:
    """Left-aligned columns, each as wide as its widest cell and never wider than its width; beyond the limit the widest gives way."""
    used = [min(width, max(len(row[at]) for row in rows)) for at, width in enumerate(widths)]
    while sum(used) + 2 * (len(used) - 1) > limit:
        used[used.index(max(used))] -= 1
    for row in rows:
        yield "  ".join(_cut(cell, width).ljust(width) for cell, width in zip(row, used, strict=True))


def _wrapped(text: str, width: int) -> Iterator[str]:
    """At most this many columns; what follows is indented under the text."""
    indent = len(text) - len(text.lstrip()) + 4
    first = True
    while text:
        room = width if first else width - indent
        end = len(text) if len(text) <= room else text.rfind(" ", room // 2, room + 1)
        end = room if end < 0 else end
        yield text[:end] if first else " " * indent + text[:end]
        text, first = text[end:].lstrip(), False


def _cut(text: str, width: int) -> str:
    """The beginning and the end, which is where names differ."""
    if len(text) <= width:
        return text
    tail = (width - 2) // 2
    return text[: width - 2 - tail] + ".." + (text[-tail:] if tail else "")


def _safe(text: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _number(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def _ms(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f} ms"
