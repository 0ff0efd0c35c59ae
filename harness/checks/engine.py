"""Runs the checks over a run: every step once for all of them, then the ends, then the folding of consequences under their cause."""

from __future__ import annotations

import fnmatch
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePath

from harness import collector
from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.registry import all_checks
from harness.model import Finding, Outcome, OutcomeKind, Severity
from harness.record import Run

# What reading a value of a shape that no sensor writes leads to. The recording is the likelier culprit (it may be forged, or of another version), so
# the check is inconclusive, and LAU125 names it as advice: it may as well be our own bug. Anything else that a check raises is a crash.
UNREADABLE = (TypeError, AttributeError, LookupError, ValueError, ArithmeticError)


@dataclass
class _Running:
    """One check on its way through the run."""

    check: Check
    steps: bool = True  # it overrides step(): the others are not asked
    outcome: Outcome | None = None
    findings: list[Finding] = field(default_factory=list)

    def settle(self, kind: OutcomeKind, reason: str = "") -> None:
        self.outcome = Outcome(self.check.code, self.check.name, kind, reason, tuple(self.findings))


def _selected(code: str, select: Sequence[str], ignore: Sequence[str]) -> bool:
    def matches(patterns: Iterable[str]) -> bool:
        return any(fnmatch.fnmatchcase(code, p) or code.startswith(p) for p in patterns)

    return (not select or matches(select)) and not matches(ignore)


def judge(run: Run, select: Sequence[str] = (), ignore: Sequence[str] = ()) -> tuple[list[Outcome], list[Finding]]:
    """(what became of every check, the findings that remain after folding), ordered by code and by severity.

    A check that raises is an outcome of its own ("inconclusive" where a value of the recording led to it, else "crashed"), never the end of the
    others.
    """
    with collector.paused():
        return _judge(run, select, ignore)


def _judge(run: Run, select: Sequence[str], ignore: Sequence[str]) -> tuple[list[Outcome], list[Finding]]:
    running: list[_Running] = []
    outcomes: list[Outcome] = []
    for kind in all_checks():
        if not _selected(kind.code, select, ignore):
            outcomes.append(Outcome(kind.code, kind.name, OutcomeKind.DESELECTED))
            continue
        running.append(_Running(kind(), steps=kind.step is not Check.step))
    running.sort(key=lambda one: one.check.last)
    run.unreadable.clear()
    for one in running:
        _guarded(run, one, partial(one.check.begin, run))
    wanting = [one for one in running if one.steps]
    if wanting:
        for step in run.steps():
            for one in wanting:
                if one.outcome is None:
                    _guarded(run, one, partial(one.check.step, step))
    unseen = not run.live and run.mostly_lost is not None
    for one in running:
        if one.outcome is None:
            _guarded(run, one, partial(_ask, one, run))
        if one.outcome is None and unseen and one.check.substantial and not one.findings:
            one.settle(OutcomeKind.INCONCLUSIVE, "the probe failed at most steps")
        if one.outcome is None:
            one.settle(OutcomeKind.RAN)
    outcomes.extend(one.outcome for one in running if one.outcome is not None)
    outcomes.sort(key=lambda o: o.code)
    return outcomes, fold([f for one in running for f in one.findings])


def _ask(one: _Running, run: Run) -> None:
    one.findings.extend(one.check.end(run))


def _guarded(run: Run, one: _Running, call: Callable[[], object]) -> None:
    try:
        call()
    except NotApplicable as reason:
        one.settle(OutcomeKind.NOT_APPLICABLE, str(reason))
    except Inconclusive as reason:
        one.settle(OutcomeKind.INCONCLUSIVE, str(reason))
    except UNREADABLE as error:
        one.findings = []
        one.settle(OutcomeKind.INCONCLUSIVE, "a value of the recording is not what this check reads")
        run.unreadable.append(f"{one.check.code}: {type(error).__name__}: {error} ({_place(error)})")
    except Exception:
        one.findings = []
        one.settle(OutcomeKind.CRASHED, traceback.format_exc(limit=-4))


def _place(error: BaseException) -> str:
    """The line of ours that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{PurePath(last.filename).name}:{last.lineno}"


def fold(findings: Sequence[Finding]) -> list[Finding]:
    """One cause, one finding: what another finding explains is named in its `consequences` and dropped.

    A finding that comes with `consequences` explains those beside what its check does. Explaining is transitive; two findings that explain
    each other keep the one that comes first by code.
    """
    symptoms = tuple(kind.code for kind in all_checks() if kind.symptom)
    causes = {f.code for f in findings if f.severity >= Severity.ERROR and f.code not in symptoms}
    explains = {kind.code: kind.explains + (symptoms if kind.code in causes else ()) for kind in all_checks()}
    own: dict[str, tuple[str, ...]] = {}  # what single findings of a code explain beside it
    for f in findings:
        own[f.code] = (*own.get(f.code, ()), *f.consequences)
    present = {f.code for f in findings}

    def reach(code: str, patterns: tuple[str, ...], seen: set[str]) -> set[str]:
        for pattern in patterns:
            for other in present:
                if other not in seen and other != code and fnmatch.fnmatchcase(other, pattern):
                    seen.add(other)
                    reach(other, explains.get(other, ()) + own[other], seen)
        return seen

    below = {code: reach(code, explains.get(code, ()) + own[code], set()) for code in sorted(present)}
    dropped: set[str] = set()
    for code in sorted(present, key=lambda c: (-len(below[c]), c)):
        if code not in dropped:
            dropped |= {other for other in below[code] if other != code and not (code in below[other] and other < code)}
    kept = [
        replace(f, consequences=tuple(sorted(reach(f.code, explains.get(f.code, ()) + f.consequences, set()) & dropped)))
        for f in findings
        if f.code not in dropped
    ]
    return sorted(kept, key=lambda f: (-f.severity, f.code))


def explained_by(code: str, findings: Sequence[Finding]) -> str | None:
    """Which of these findings says what a finding of `code` would: its check names that code as a mere consequence."""
    patterns = {kind.code: kind.explains for kind in all_checks()}
    return next((f.code for f in findings if any(fnmatch.fnmatchcase(code, p) for p in patterns.get(f.code, ()))), None)
