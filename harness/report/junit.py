"""JUnit XML: a testsuite a run, a testcase a check. Always well-formed: what XML 1.0 cannot hold is taken out, also of an aborted run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

# Works on report documents (report/json.py), so that `harness report` and a finished run give the same file.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def legal(text: Any) -> str:
    """Text that XML 1.0 may hold."""
    return _NOT_XML.sub("", _ANSI.sub("", str(text)))


def render(reports: Sequence[Mapping[str, Any]]) -> str:
    root = ElementTree.Element("testsuites", name="harness")
    suites = [_suite(root, report) for report in reports]
    for key in ("tests", "failures", "errors", "skipped"):
        root.set(key, str(sum(int(suite.get(key, "0")) for suite in suites)))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(root: ElementTree.Element, report: Mapping[str, Any]) -> ElementTree.Element:
    name = legal(report["name"])
    suite = ElementTree.SubElement(root, "testsuite", name=name)
    _properties(suite, report)
    cases = [_run_case(suite, name, report)]
    by_code: dict[str, list[Mapping[str, Any]]] = {}
    for finding in report.get("findings", ()):
        by_code.setdefault(finding["code"], []).append(finding)
    for check in report.get("checks", ()):
        cases.append(_case(suite, name, check, by_code.pop(check["code"], [])))
    for code, findings in by_code.items():  # a finding whose check is not listed
        cases.append(_case(suite, name, {"code": code, "name": findings[0]["name"], "outcome": "ran", "reason": ""}, findings))
    suite.set("tests", str(len(cases)))
    for tag, key in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(key, str(sum(case.find(tag) is not None for case in cases)))
    suite.set("time", f"{float((report.get('ending') or {}).get('wall_s') or 0.0):.3f}")
    return suite


def _properties(suite: ElementTree.Element, report: Mapping[str, Any]) -> None:
    holder = ElementTree.SubElement(suite, "properties")
    facts: dict[str, Any] = {
        "verdict": report.get("verdict", report["status"]),
        "exit_code": report.get("exit_code", ""),
        "run_id": report["run_id"],
    }
    for family, values in (report.get("summary") or {}).items():
        if isinstance(values, Mapping):
            facts.update({f"{family}.{key}": value for key, value in values.items() if isinstance(value, (int, float, str))})
        else:
            facts[family] = values
    for key, value in facts.items():
        ElementTree.SubElement(holder, "property", name=legal(key), value=legal(value))


def _run_case(suite: ElementTree.Element, name: str, report: Mapping[str, Any]) -> ElementTree.Element:
    """The run itself, so that an aborted or unchecked one is never an empty, green suite."""
    case = ElementTree.SubElement(suite, "testcase", classname=name, name="run")
    word = report.get("verdict", "still running or killed")
    if word in ("sane", "findings"):
        return case
    tag = "failure" if word == "failed" else "error"
    ElementTree.SubElement(case, tag, message=legal(word), type=legal(word)).text = legal(_why(report))
    return case


def _why(report: Mapping[str, Any]) -> str:
    failure = report.get("failure")
    if failure:
        return "\n".join([f"rank {failure['rank']}: {failure['type']}: {failure['message']}", *failure["traceback"]])
    return str((report.get("ending") or {}).get("launcher_error") or "")


def _case(suite: ElementTree.Element, name: str, check: Mapping[str, Any], findings: Sequence[Mapping[str, Any]]) -> ElementTree.Element:
    case = ElementTree.SubElement(suite, "testcase", classname=name, name=legal(f"{check['code']} {check['name']}"))
    wrong = [f for f in findings if f["severity"] in ("error", "warning")]
    if check["outcome"] == "crashed":
        ElementTree.SubElement(case, "error", message=legal(check["reason"] or "the check crashed"), type="crashed")
    elif wrong:
        first = wrong[0]
        element = ElementTree.SubElement(
            case, "failure", message=legal(first["message"]), type=legal(f"{first['severity']}[{first['code']}]")
        )
        element.text = "\n\n".join(legal(_finding_text(f)) for f in wrong)
    elif findings:
        ElementTree.SubElement(case, "system-out").text = "\n\n".join(legal(_finding_text(f)) for f in findings)
    elif check["outcome"] != "ran":
        ElementTree.SubElement(case, "skipped", message=legal(f"{check['outcome']}: {check['reason']}".rstrip(": ")))
    return case


def _finding_text(finding: Mapping[str, Any]) -> str:
    where = finding.get("where")
    lines = [f"{finding['severity']}[{finding['code']}]: {finding['name']}: {finding['message']}"]
    if where:
        lines.append(f"  --> {where['file']}:{where['line']}")
    lines += [f"   = note: {note}" for note in finding.get("notes", ())]
    if finding.get("help"):
        lines.append(f"   = help: {finding['help']}")
    return "\n".join(lines)
