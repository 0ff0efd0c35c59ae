"""From outcomes, findings and the ending to an exit code and a word. The one place where precedence is decided."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from harness import errors
from harness.model import Ending, Finding, Outcome, OutcomeKind, Severity, Verdict

LEVELS = {"error": Severity.ERROR, "warning": Severity.WARNING, "advice": Severity.ADVICE}
INTERRUPTED = "interrupted"


def exit_code(
    ending: Ending,
    outcomes: Sequence[Outcome],
    findings: Sequence[Finding],
    *,
    fail_on: str,
    substantial: Collection[str],
    signal_code: int = errors.EXIT_SIGINT,
) -> int:
    """130/143 > 3 > 2 > 4 > 1 > 5 > 0. `substantial`: codes of the checks that count as "something was checked"."""
    if ending.reason == INTERRUPTED:
        return signal_code
    if any(o.kind is OutcomeKind.CRASHED for o in outcomes):
        return errors.EXIT_INTERNAL
    if not ending.started:
        return errors.EXIT_NOT_LAUNCHED
    if failed(ending) or any(counts(f, fail_on) for f in findings):
        return errors.EXIT_FINDINGS
    if ending.reason == "fail-fast" and not any(f.severity is Severity.ERROR for f in findings):
        return errors.EXIT_NOTHING_CHECKED  # it was cut short for a suspicion that the whole recording does not bear out
    if not any(o.kind is OutcomeKind.RAN and o.code in substantial for o in outcomes):
        return errors.EXIT_NOTHING_CHECKED
    return errors.EXIT_SANE


def counts(finding: Finding, fail_on: str) -> bool:
    return fail_on in LEVELS and finding.severity >= LEVELS[fail_on]


def failed(ending: Ending) -> bool:
    """A rank failed by itself, the launcher did, or the run hung or ran out of time."""
    return (
        ending.reason in ("hang", "timeout", "folder-deleted", "scheduler")
        or bool(ending.reason == "exited" and ending.launcher_error)
        or any(e.code != 0 and not e.by_us for e in ending.exits)
    )


def word_of(verdict: Verdict) -> str:
    """sane | findings | failed | interrupted | not launched | nothing checked | internal error."""
    code = verdict.exit_code
    if code in (errors.EXIT_SIGINT, errors.EXIT_SIGTERM):
        return INTERRUPTED
    if code == errors.EXIT_FINDINGS:
        return "failed" if failed(verdict.ending) else "findings"
    return {
        errors.EXIT_SANE: "sane",
        errors.EXIT_NOT_LAUNCHED: "not launched",
        errors.EXIT_NOTHING_CHECKED: "nothing checked",
    }.get(code, "internal error")
