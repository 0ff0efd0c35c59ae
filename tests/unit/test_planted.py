"""Planted faults and pages: every edit matches once, every code exists, and which checks have no planted fault is said here, with the reason."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from harness.checks.registry import all_checks, page
from harness.errors import UsageError
from harness.model import Severity
from harness.planted import all_planted, load

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ("What it does", "Why it is bad", "Wrong", "Right", "Known limits")

# Errors and warnings that no planted fault triggers. Each has faulty and healthy recordings in tests/unit/checks; what more there is, is said here.
SLURM = "only a run that Slurm made can have it: tests/slurm"
NOT_THE_SCRIPT = "the machine, the launcher or a setting of the run is at fault, not the script: tests/faults, tests/e2e"
STANDS_STILL = "seconds of standing still, and named by its cause in a script of two ranks: tests/faults"
NO_LINE = "the finding stands on no line, and a planted fault asks for one"
CLOCK = "rests on seconds of a quiet machine with a core for each rank and worker"
NO_TWIN = "no scenario does the like in its right form, so that a healthy twin would not be checked"
UNPLANTED = {
    "CKP118": "needs a score that gets worse after a resume; the scenarios learn",
    "DAT123": f"{NO_TWIN}: a data set that numbers words",
    "DEV106": NO_LINE,
    "DEV107": "needs a GPU",
    "HNG101": STANDS_STILL,
    "HNG103": STANDS_STILL,
    "HNG104": STANDS_STILL,
    "HNG107": SLURM,
    "LAU103": NOT_THE_SCRIPT,
    "LAU111": "a script without a process group; that of a healthy twin makes it inapplicable",
    "LAU113": NOT_THE_SCRIPT,
    "LAU114": NOT_THE_SCRIPT,
    "LAU121": NOT_THE_SCRIPT,
    "LAU122": NO_LINE,
    "LAU124": NOT_THE_SCRIPT,
    "LAU125": NOT_THE_SCRIPT,
    "LAU126": NOT_THE_SCRIPT,
    "LAU131": SLURM,
    "LAU132": SLURM,
    "LAU133": SLURM,
    "LAU134": SLURM,
    "LAU135": SLURM,
    "LAU136": SLURM,
    "LAU138": SLURM,
    "MEM105": "needs a budget, which is a setting of the run",
    "OPT114": "needs a reference run, which a selftest leaves out",
    "OPT115": "needs a second run, which a selftest leaves out",
    "OPT120": f"{NO_TWIN}: LBFGS",
    "OUT104": "needs the tensorboard package",
    "OUT106": "needs the tensorboard package",
    "PRF102": CLOCK,
    "PRF103": CLOCK,
    "PRF108": CLOCK,
    "PRF109": CLOCK,
    "PRF111": CLOCK,
    "PRF112": CLOCK,
    "PRF113": f"{NO_TWIN}: binding ranks to cores, which would make a scenario slow on a shared machine",
    "PRF114": f"{NO_TWIN}: torch.compile takes seconds",
    "SHM106": "would fill the /dev/shm of the machine that the selftest runs on",
    "SHM108": f"{NO_TWIN}: tensors in queues",
    "SHM109": "half of hogwild would have to be written anew, its barriers and its race",
    "SHM110": "half of hogwild would have to be written anew",
    "SYN122": "needs a run that comes through; between two ranks the same mistake hangs (OUT101) or mixes two values (SYN121)",
    "SYN133": f"{NO_TWIN}: a contrastive loss over all ranks",
    "SYN134": f"{NO_TWIN}: local SGD",
    "SYN146": "no scenario exchanges differences from an anchor; tests/cases 1366 and 2028 do",
    "SYN135": f"{NO_TWIN}: parameters that are averaged after every step, without DDP",
    "SYN142": f"{NO_TWIN}: a contrastive loss over all ranks",
    "SYN144": f"{NO_TWIN}: the right form is a buffer, and no plain tensor",
}


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


def test_every_error_and_warning_is_planted_or_it_is_said_why_not() -> None:
    codes = {check.code for check in all_checks() if check.severity >= Severity.WARNING}
    planted = {fault.finds for fault in all_planted()}
    assert codes - planted - set(UNPLANTED) == set(), "plant it in scenarios/faults, or give the reason in UNPLANTED"
    assert set(UNPLANTED) & planted == set() and set(UNPLANTED) <= codes, "no longer true of UNPLANTED"


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
