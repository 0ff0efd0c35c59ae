"""LAU120 untested-torch-version: the checks were never tried with this torch.

What it does
    Compares the torch version that the ranks imported with the oldest and the newest one that the harness was tried with. Advice.

Why it is bad
    The probe hooks functions of torch that change between versions. With an untested one a sensor may be silent, so a clean verdict says
    less.

Wrong
    torch 2.3 under this harness

Right
    torch 2.9 to 2.14

Known limits
    A nightly build bears the number of the release to come.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Run

OLDEST, NEWEST = (2, 9), (2, 14)


class UntestedTorchVersion(Check):
    code = "LAU120"
    name = "untested-torch-version"
    severity = Severity.ADVICE
    substantial = False

    def end(self, run: Run) -> Iterable[Finding]:
        found = sorted({str(e["version"]) for r in run.processes for e in r.of("torch")[:1]})
        if not found:
            raise NotApplicable("no rank imported torch")
        for version in found:
            number = _number(version)
            if number is not None and not OLDEST <= number <= NEWEST:
                yield self.finding(
                    f"torch {version} is untested here: the checks were tried with {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}",
                    help="read silence with care, or use a tested version",
                )
                return


def _number(version: str) -> tuple[int, int] | None:
    parts = version.split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit() else None
