"""JUnit XML: parseable whatever a script prints, and never green where nothing was judged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
from controller_samples import FINDING, OUTCOMES, T0, make_plan, make_run
from test_report_console import failing_run
from test_report_json import document_of

from harness.model import Ending, Outcome, OutcomeKind, Severity
from harness.report import json as report_json
from harness.report import junit


def parse(*documents: dict[str, Any]) -> ElementTree.Element:
    return ElementTree.fromstring(junit.render(documents))


def case(root: ElementTree.Element, name: str) -> ElementTree.Element:
    return next(c for c in root.iter("testcase") if c.get("name", "").startswith(name))


def test_a_testcase_a_check() -> None:
    root = parse(document_of(make_run(), 1, findings=(FINDING,)))
    assert {c.get("name", "").split()[0] for c in root.iter("testcase")} == {"run", *(o.code for o in OUTCOMES)}
    failure = case(root, "DAT101").find("failure")
    assert failure is not None
    assert failure.get("type") == "error[DAT101]"
    assert "--> /home/u/project/train.py:41" in (failure.text or "")
    skipped = case(root, "MEM103").find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "inconclusive: 40 steps; a trend needs 200"
    assert list(case(root, "DAT102")) == []


def test_counts_agree_with_the_cases() -> None:
    suite = next(parse(document_of(make_run(), 1, findings=(FINDING,))).iter("testsuite"))
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors"), suite.get("skipped")) == (str(len(OUTCOMES) + 1), "1", "0", "4")


def test_advice_does_not_fail() -> None:
    root = parse(document_of(make_run(), 0, findings=(replace(FINDING, severity=Severity.ADVICE),)))
    assert case(root, "DAT101").find("failure") is None
    assert case(root, "DAT101").find("system-out") is not None


def test_a_crashed_check_is_an_error() -> None:
    crashed = (Outcome("DAT101", "x", OutcomeKind.CRASHED, "Traceback ..."),)
    assert case(parse(document_of(make_run(), 3, outcomes=crashed)), "DAT101").find("error") is not None


@pytest.mark.parametrize(("code", "tag"), [(1, "failure"), (3, "error"), (4, "error"), (5, "error"), (130, "error")])
def test_a_run_that_was_not_judged_is_never_green(code: int, tag: str) -> None:
    ending = Ending("hang") if code == 1 else Ending("interrupted")
    assert case(parse(document_of(make_run([], ending=ending), code, outcomes=())), "run").find(tag) is not None


def test_a_killed_run_gives_valid_xml() -> None:
    root = parse(report_json.running(make_plan(), [], T0))
    assert case(root, "run").find("error") is not None


def test_metrics_are_properties() -> None:
    root = parse(document_of(make_run()))
    values = {p.get("name"): p.get("value") for p in root.iter("property")}
    assert float(values["throughput.samples_per_s"] or 0) > 0
    assert values["verdict"] == "sane"


def test_control_characters_and_markup_are_harmless() -> None:
    nasty = replace(FINDING, message="]]> <b> \x00\x1b[31m\x08 \ufffe & \ud800", notes=("\x0b",))
    root = parse(document_of(make_run(), 1, findings=(nasty,)))
    failure = case(root, "DAT101").find("failure")
    assert failure is not None
    assert failure.get("message") == "]]> <b>   & ?"


def test_the_traceback_is_in_the_run_case() -> None:
    failure = case(parse(document_of(failing_run(), 1)), "run").find("failure")
    assert failure is not None
    assert "ZeroDivisionError" in (failure.text or "")
