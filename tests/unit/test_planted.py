"""Planted faults and pages: every edit matches once, every code exists, and which checks have no planted fault is said here, with the reason."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from harness.checks.registry import all_checks, page
from harness.errors import UsageError
from harness.planted import all_planted, load

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ("What it does", "Why it is bad", "Wrong", "Right", "Known limits")


def test_every_planted_fault_is_one_edit_of_a_scenario_and_compiles() -> None:
    planted = all_planted()
    assert len(planted) >= 60
    assert len({p.full_name for p in planted}) == len(planted)
    for fault in planted:
        ast.parse(fault.source, fault.full_name)
        assert fault.story, f"{fault.full_name} has no story"


def test_every_planted_fault_names_a_check() -> None:
    codes = {check.code for check in all_checks()}
    assert {p.finds for p in all_planted()} <= codes


@pytest.mark.parametrize("check", all_checks(), ids=lambda c: c.code)
def test_every_check_has_a_whole_page(check: type) -> None:
    text = page(check)
    assert text.startswith(f"{check.code} {check.name}"), text.splitlines()[0]  # type: ignore[attr-defined]
    missing = [s for s in SECTIONS if f"\n{s}\n" not in text]
    assert missing == []


def test_an_edit_that_does_not_match_once_is_refused(tmp_path: Path) -> None:
    (tmp_path / "seeds.toml").write_text('[twice]\nreplace = "import"\nwith = ""\nfinds = "DAT101"\n')
    with pytest.raises(UsageError, match="times, not once"):
        load("seeds", tmp_path / "seeds.toml")
