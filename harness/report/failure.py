"""The failing rank's own traceback, for the top of the report: the one that failed first, not the one the launcher blames."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from harness.frames import is_ours
from harness.model import Finding, Severity
from harness.probe import protocol
from harness.record import Event, Run
from harness.report.text import clean, one_line

MAX_LINES = 40
LAST_LOG_LINES = 12
ENTRY = re.compile(r'\s*File "([^"]*)", line \d+')


def first_failure(run: Run, findings: Sequence[Finding]) -> tuple[int, Event] | None:
    """(rank, failure event) of the culprit: the rank that an error names, else the earliest."""
    named = _named(findings)
    well = {e.rank for e in run.ending.exits if e.code == 0} - named  # it caught the exception and went on
    events = [(rank, e) for one in (run, *run.others) for rank, e in one.events(protocol.FAILURE) if rank not in well]
    if not events:
        return None
    return min(events, key=lambda item: (item[0] not in named, item[1].t_ns)) if named else min(events, key=lambda item: item[1].t_ns)


def _named(findings: Sequence[Finding]) -> set[int]:
    return {rank for f in findings if f.code.startswith("LAU") and f.severity is Severity.ERROR for rank in f.ranks[:1]}


def failure_lines(run: Run, findings: Sequence[Finding]) -> list[str]:
    """Lines to show before the findings; none where no rank failed by itself."""
    found = first_failure(run, findings)
    if found is not None:
        rank, event = found
        return [f"rank {rank} failed first: {_headline(event)}", *(f"  | {line}" for line in traceback_lines(str(event["trace"] or "")))]
    failed = [e for e in run.ending.exits if e.code != 0 and not e.by_us]
    if not failed:
        return []
    named = _named(findings)
    first = min(failed, key=lambda e: (e.rank not in named, e.time_ns))
    said = [f"  | {line}" for line in last_lines(run.logs.get(first.rank, ""))]
    return [f"rank {first.rank} {how_it_ended(first.code)}; the end of its output:", *said]


def _headline(event: Event) -> str:
    kind, message = str(event["type"] or "exception"), one_line(str(event["message"] or ""), 300)
    return one_line(f"{kind}: {message}" if message else kind)


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    import signal

    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def traceback_lines(trace: str) -> list[str]:
    """A traceback without control characters and without the frames of the launcher."""
    kept: list[str] = []
    dropping = False
    for line in clean(trace).splitlines():
        entry = ENTRY.match(line)
        if entry:
            dropping = entry[1] == "<frozen runpy>" or is_ours(entry[1])
        elif not line.startswith("    "):
            dropping = False
        if not dropping and line.strip():
            kept.append(line.rstrip()[:500])
    if len(kept) > MAX_LINES:
        half = MAX_LINES // 2
        kept = [*kept[:half], f"... {len(kept) - MAX_LINES} lines ...", *kept[-half:]]
    return kept


def last_lines(log: str) -> list[str]:
    lines = [line.rstrip()[:500] for line in clean(log[-20_000:]).splitlines() if line.strip()]
    return lines[-LAST_LOG_LINES:] or ["(no output)"]


def as_dict(run: Run, findings: Sequence[Finding]) -> dict[str, Any] | None:
    """The same for report.json."""
    found = first_failure(run, findings)
    if found is None:
        return None
    rank, event = found
    message, trace = clean(str(event["message"] or "")), traceback_lines(str(event["trace"] or ""))
    return {"rank": rank, "type": str(event["type"] or ""), "message": message, "traceback": trace}
