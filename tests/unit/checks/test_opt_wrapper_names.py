"""OPT140: tests of names that all begin with a wrapper's prefix."""

from __future__ import annotations

from typing import Any

import pytest
from builder import event, findings, recording, row, run, site

from harness.checks.opt.wrapper_names import WrapperNames
from harness.model import Severity
from harness.record import Run

TOLD: dict[str, Any] = {
    "site": site(76, func="param_groups"), "given_at": site(108), "prefix": "module.", "test": "name.startswith('backbone.')", "fits": 8, "num": 12,
    "wrapper": "DistributedDataParallel", "effect": "group", "opt": 0,
}  # fmt: skip


def told(*changes: dict[str, Any]) -> Run:
    return run([recording([event("wrapped_names", **(TOLD | c)) for c in changes], [row(s) for s in range(4)], rank=rank) for rank in (0, 1)])


def test_a_group_that_is_empty() -> None:
    (found,) = findings(WrapperNames, told({}))
    assert (found.code, found.severity, found.ranks) == ("OPT140", Severity.ERROR, (0, 1))
    assert found.where and found.where.line == 108 and "`module.`" in found.message and "group" in found.message and "train.py:76" in found.notes[0]


@pytest.mark.parametrize(("effect", "severity"), [("rates", Severity.ERROR), ("freeze", Severity.ERROR), ("", Severity.ADVICE)])
def test_what_the_optimizer_shows_decides(effect: str, severity: Severity) -> None:
    (found,) = findings(WrapperNames, told({"effect": effect, "given_at": None, "prefix": "_orig_mod."}))
    assert found.severity is severity and found.where and found.where.line == 76 and "_orig_mod.named_parameters" in str(found.help)


def test_two_tests_of_one_function_are_one_mistake() -> None:
    (found,) = findings(WrapperNames, told({"effect": ""}, {"site": site(77, func="param_groups")}))
    assert found.severity is Severity.ERROR
    assert findings(WrapperNames, told()) == []
