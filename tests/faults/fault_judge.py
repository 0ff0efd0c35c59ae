"""What of a verdict is not as the table asks."""

from __future__ import annotations

import os
from typing import Any

from fault_cases import Case
from fault_script import culprit_line
from fault_stage import Evidence


def misses(case: Case, seen: Evidence) -> list[str]:
    """Everything in which the verdict is not what the table asks for."""
    report, first = seen.report, (seen.errors or [None])[0]
    wrong = [
        f"{name} is {got!r}, not {want!r}"
        for name, got, want in (
            ("exit code", report["exit_code"], case.exit_code),
            ("reason", report["ending"]["reason"], case.reason),
            ("left behind", report["ending"]["left_behind"], []),
            ("found left", seen.left, []),
            ("stored report", (seen.stored["status"], seen.stored.get("exit_code")), ("done", case.exit_code)),
            ("checks that crashed", [c["code"] for c in report["checks"] if c["outcome"] == "crashed"], []),
        )
        if got != want
    ]
    bound_s = (case.bound_s + (seen.cold_s if case.reason == "timeout" else 0.0)) * crowded()
    if bound_s and (seen.verdict_after_s is None or seen.verdict_after_s > bound_s):
        wrong.append(f"the verdict came after {seen.verdict_after_s} s, not {bound_s}")
    if first is None:
        return [*wrong, *(["no error was found"] if case.codes else [])]
    if not case.codes:
        return [*wrong, f"false alarm {first['code']}"]
    return [*wrong, *misnamed(case, seen, first)]


def crowded() -> float:
    """How many times slower this machine is than an idle one: the bounds are those of a run that has its cores for itself."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def misnamed(case: Case, seen: Evidence, first: dict[str, Any]) -> list[str]:
    wrong = []
    if first["code"] not in case.codes:
        wrong.append(f"the first error is {first['code']}, not {' or '.join(case.codes)}")
    if case.ranks and (not first["ranks"] or not set(first["ranks"]) <= set(case.ranks)):
        wrong.append(f"culprit {first['ranks']}, not {case.ranks}")
    line, where = culprit_line(seen.source), first["where"]
    if line and (where is None or where["line"] != line):
        wrong.append(f"where is {where}, not line {line}")
    if case.says and case.says not in f"{first['message']} {first['notes']}":
        wrong.append(f"{first['message']!r} does not say {case.says!r}")
    return wrong


def logs(seen: Evidence) -> str:
    return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in sorted((seen.folder / "logs").glob("*.log")))
