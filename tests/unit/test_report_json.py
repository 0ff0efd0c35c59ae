"""report.json: held to its schema, also for runs that went wrong and recordings that lie."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from controller_samples import FINDING, OUTCOMES, T0, exits, make_plan, make_recording, make_run
from test_report_console import failing_run, verdict_of

from harness.model import Ending, RankStacks, Where
from harness.record import Run
from harness.report import json as report_json

SCHEMA = json.loads(report_json.SCHEMA_FILE.read_text("utf-8"))


def check(document: dict[str, Any]) -> dict[str, Any]:
    again: dict[str, Any] = json.loads(json.dumps(document, allow_nan=False))
    jsonschema.validate(again, SCHEMA)
    return again


def document_of(run: Run, code: int = 0, **more: Any) -> dict[str, Any]:
    return report_json.finished(run, verdict_of(run, code, **more), ["torchrun", "train.py"], T0)


def test_the_schema_itself_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_a_sane_run() -> None:
    document = check(document_of(make_run(reference=make_run([make_recording(0, world=1)]))))
    assert document["verdict"] == "sane"
    assert document["counts"] == {
        "error": 0,
        "warning": 0,
        "advice": 0,
        "ran": 3,
        "not_applicable": 2,
        "inconclusive": 1,
        "crashed": 0,
        "deselected": 1,
    }
    assert [r["exit_code"] for r in document["ranks"]] == [0, 0]
    assert {c["code"]: c["reason"] for c in document["checks"]}["MEM103"] == "40 steps; a trend needs 200"


def test_findings_and_a_failure() -> None:
    run = failing_run()
    document = check(document_of(run, 1, findings=(FINDING,)))
    assert document["verdict"] == "failed"
    assert document["failure"]["rank"] == 1
    assert document["findings"][0]["where"]["line"] == 41


@pytest.mark.parametrize("code", [1, 3, 4, 5, 130, 143])
def test_every_exit_code_has_a_valid_report(code: int) -> None:
    run = make_run([], ending=Ending("interrupted", started=False))
    assert check(document_of(run, code, outcomes=()))["exit_code"] == code


def test_a_hang_with_stacks() -> None:
    stacks = (RankStacks(0, {"MainThread": (Where("train.py", 3, "main", "dist.barrier()"),)}),)
    run = make_run(ending=Ending("hang", exits=exits(-9, -9), stacks=stacks, hang_after_s=20.0))
    assert check(document_of(run, 1))["ending"]["stacks"][0]["threads"]["MainThread"][0]["text"] == "dist.barrier()"


def test_what_json_cannot_hold_is_made_plain() -> None:
    evidence = {"nan": math.nan, "set": {1}, "bytes": b"\xff", 3: "key", "lone": "\ud800"}
    run = make_run([make_recording(0, loss=math.inf), make_recording(1, loss=math.nan)])
    document = check(document_of(run, 1, findings=(replace(FINDING, evidence=evidence),)))
    assert document["findings"][0]["evidence"]["nan"] is None
    assert document["findings"][0]["evidence"]["3"] == "key"


def test_a_run_that_goes_on_is_valid_and_no_verdict() -> None:
    document = check({**report_json.running(make_plan(), ["torchrun"], T0), "controller": {"pid": 1, "start_ticks": 2}})
    assert document["status"] == "running"
    assert "verdict" not in document


def test_several_scripts_make_a_session_and_one_makes_its_report() -> None:
    one = document_of(make_run())
    assert check(report_json.session([one], 0)) == check(one)
    both = check(report_json.session([one, one], 0))
    assert (both["kind"], len(both["runs"])) == ("session", 2)


def test_the_schema_refuses_what_is_wrong() -> None:
    good = document_of(make_run())
    for wrong in ({"verdict": "fine"}, {"exit_code": 2}, {"findings": [{}]}, {"version": 2}, {"ranks": [{"rank": -1}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**good, **wrong}, SCHEMA)
    assert len(OUTCOMES) == len(good["checks"])
