"""Verdicts as JUnit XML, for CI systems that show test reports. Pure.

A suite per deployment, in it a case per node and one, named after the deployment, for what concerns no single node. A finding is a
failure; what could not be looked at is an error; a node that the quorum allows to be missing is skipped. Text from other machines is
escaped, and what XML cannot hold at all is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from consistency.findings import Finding, Reason, Verdict

MAX_TOLD = 20  # failures of one case; their number is told

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def document(verdicts: Sequence[Verdict], duration_s: float, fault: str = "") -> bytes:
    """`fault`: why there are no verdicts, if so."""
    root = ElementTree.Element("testsuites", name="raftmeta check", time=f"{duration_s:.3f}")
    for verdict in verdicts:
        _suite(root, verdict)
    if fault:
        suite = ElementTree.SubElement(root, "testsuite", name="raftmeta check", tests="1", failures="0", errors="1", skipped="0")
        case = ElementTree.SubElement(suite, "testcase", classname="raftmeta check", name="members")
        ElementTree.SubElement(case, "error", message=_clean(fault))
    ElementTree.indent(root)
    made: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return made + b"\n"


def _suite(root: ElementTree.Element, verdict: Verdict) -> None:
    name = _clean(verdict.deployment)
    cases = [verdict.deployment, *(node.node for node in verdict.nodes)]
    suite = ElementTree.SubElement(root, "testsuite", name=name, tests=str(len(cases)))
    counts = {"failures": 0, "errors": 0, "skipped": 0}
    for at, case_name in enumerate(cases):
        node = case_name if at else ""
        case = ElementTree.SubElement(suite, "testcase", classname=name, name=_clean(case_name))
        findings = [finding for finding in verdict.findings if finding.node == node]
        reasons = [reason for reason in verdict.reasons if reason.node == node]
        unseen = [reason for reason in verdict.unseen if reason.node == node]
        if not node and verdict.findings_total > len(verdict.findings):
            case.set("findings_total", str(verdict.findings_total))
        if findings:
            counts["failures"] += 1
            failure = ElementTree.SubElement(case, "failure", type=findings[0].code, message=f"{len(findings)} differences")
            failure.text = "\n".join(_finding(finding) for finding in findings[:MAX_TOLD])
        elif reasons:
            counts["errors"] += 1
            ElementTree.SubElement(case, "error", type=_clean(reasons[0].code), message=_clean("; ".join(map(_reason, reasons[:MAX_TOLD]))))
        elif unseen:
            counts["skipped"] += 1
            ElementTree.SubElement(case, "skipped", message=_clean(_reason(unseen[0])))
    for kind, count in counts.items():
        suite.set(kind, str(count))


def _finding(finding: Finding) -> str:
    where = f" {finding.tensor}" if finding.tensor else ""
    block = f" block {finding.block}" if finding.block >= 0 else ""
    detail = f" ({finding.detail})" if finding.detail else ""
    return _clean(f"{finding.code}{where}{block}: expected {finding.expected}, found {finding.found}{detail}")


def _reason(reason: Reason) -> str:
    return f"{reason.code}: {reason.detail}"


def _clean(text: str) -> str:
    return _NOT_XML.sub("�", text)
