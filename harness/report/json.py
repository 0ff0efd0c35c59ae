"""report.json: everything a program may want to know of a run. Versioned; described by report.schema.json, which the tests hold it to.

VERSION rises when a field goes or changes its meaning; a new field leaves it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from harness import __version__
from harness.model import Finding, Outcome, OutcomeKind, Plan, Verdict, Where
from harness.record import Run
from harness.report import failure, figures
from harness.report.verdict import word_of

VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("report.schema.json")


def running(plan: Plan, command: Sequence[str], started_ns: int) -> dict[str, Any]:
    """What lies in the folder until the run has ended; it stays there if the controller is killed."""
    return {**_head(plan, "running"), "started_ns": started_ns, "command": list(command)}


def finished(run: Run, verdict: Verdict, command: Sequence[str], started_ns: int, status: str = "done") -> dict[str, Any]:
    """The whole report. `status`: done, or recovered (judged from what a killed controller left)."""
    exits = {e.rank: e for e in verdict.ending.exits}
    ranks = figures.table(run)
    document = {
        **_head(verdict.plan, status),
        "started_ns": started_ns,
        "command": list(command),
        "verdict": word_of(verdict),
        "exit_code": verdict.exit_code,
        "counts": _counts(verdict),
        "failure": failure.as_dict(run, verdict.findings),
        "findings": [_finding(f) for f in verdict.findings],
        "checks": [_outcome(o) for o in verdict.outcomes],
        "summary": dict(verdict.summary),
        "ranks": [{**asdict(r), "exit_code": exits[r.rank].code if r.rank in exits else None} for r in ranks],
        "torch": figures.versions(run),
        "device": figures.devices(run),
        "backend": figures.backend(run),
        "num_cores": run.num_cores,
        "ending": asdict(verdict.ending),
    }
    whole: dict[str, Any] = plain(document)
    return whole


def _head(plan: Plan, status: str) -> dict[str, Any]:
    return {
        "kind": "run",
        "version": VERSION,
        "harness": __version__,
        "status": status,
        "run_id": plan.run_id,
        "name": plan.scenario.name,
        "plan": plain(asdict(plan)),
    }


def session(reports: Sequence[Mapping[str, Any]], exit_code: int) -> dict[str, Any]:
    """One document for `--format json`: the report itself, or all of them where several scripts ran."""
    if len(reports) == 1:
        return dict(reports[0])
    return {"kind": "session", "version": VERSION, "harness": __version__, "exit_code": exit_code, "runs": [dict(r) for r in reports]}


def _counts(verdict: Verdict) -> dict[str, int]:
    severities = Counter(f.severity.word for f in verdict.findings)
    kinds = Counter(o.kind for o in verdict.outcomes)
    return {
        **{word: severities[word] for word in ("error", "warning", "advice")},
        **{kind.value.replace(" ", "_"): kinds[kind] for kind in OutcomeKind},
    }


def _where(where: Where | None) -> dict[str, Any] | None:
    return None if where is None else asdict(where)


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "name": finding.name,
        "severity": finding.severity.word,
        "message": finding.message,
        "where": _where(finding.where),
        "ranks": list(finding.ranks),
        "notes": list(finding.notes),
        "help": finding.help,
        "evidence": dict(finding.evidence),
        "consequences": list(finding.consequences),
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {"code": outcome.code, "name": outcome.name, "outcome": outcome.kind.value, "reason": outcome.reason}


def plain(value: Any) -> Any:
    """Only what JSON has: text that encodes, no NaN (JSON has none: null), keys that are text; unknown objects as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {str(plain(k)): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    return str(value)
