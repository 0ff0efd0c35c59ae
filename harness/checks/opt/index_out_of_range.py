"""OPT118 index-out-of-range: a label or an index is outside of what it indexes.

What it does
    Recognises the failure by torch's own words on CPU ("Target 10 is out of bounds", "index out of range in self", "index 7 is
    out of bounds for dimension 0 with size 5") and on GPUs by what the kernel printed, and names the value, the range and the
    user's line. An error.

Why it is bad
    On a GPU the same mistake is a device-side assert at a later line, the context is lost, and the other ranks hang in their next
    collective.

Wrong
    labels = frame["class"].values             # 1..10 for nn.Linear(64, 10)
    labels[unknown] = -1

Right
    labels = frame["class"].values - 1
    F.cross_entropy(logits, labels, ignore_index=-1)

Known limits
    Without CUDA_LAUNCH_BLOCKING=1 a GPU's line is where it surfaced. An index error of a Python list is LAU101.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.lau import blame
from harness.model import Finding, Severity
from harness.record import Event, Run

TARGET = re.compile(r"Target (-?\d+) is out of bounds")
INDEX = re.compile(r"index (-?\d+) is out of (?:bounds|range) for (?:dimension|axis) (\d+) with size (\d+)")
BAG = re.compile(r"takes value (-?\d+) which is not in the valid range \[0, (\d+)\)")
OTHERS = re.compile(
    r"index out of range in self|Class values must be (smaller|non-negative)|index out of bounds|Index tensor.*out of bounds"
    r"|srcIndex < srcSelectDimSize",
    re.IGNORECASE,
)
KERNEL = re.compile(r"Assertion `([^`]*(?:n_classes|srcSelectDimSize|index|idx|ind)[^`]*)` failed", re.IGNORECASE)


class IndexOutOfRange(Check):
    code = "OPT118"
    name = "index-out-of-range"
    severity = Severity.ERROR
    substantial = False
    explains = ("LAU101", "LAU102", "DEV107", "HNG*")

    def end(self, run: Run) -> Iterable[Finding]:
        if run.live and not any(True for _ in blame.failures(run)):
            raise NotApplicable("no rank has failed so far")
        raised = [(rank, e, what) for rank, _, e in blame.failures(run) if (what := self._what(run, rank, e))]
        if not raised:
            return
        rank, event, what = min(raised, key=lambda item: item[1].t_ns)
        yield self.finding(
            what,
            where=event.where,
            ranks=sorted({r for r, _, _ in raised}),
            notes=self._notes(run, rank, event),
            help="check labels and ids before training: 0 <= value < number of classes (or rows); use ignore_index for the "
            "ones that do not count",
        )

    def _what(self, run: Run, rank: int, event: Event) -> str:
        text = f"{event['message']}"
        if match := TARGET.search(text):
            limit = _offender(event).get("limit")
            classes = f": there are {limit} classes" if isinstance(limit, int) else ""
            return f"label {match[1]} is out of range{classes}"
        if match := INDEX.search(text):
            return f"index {match[1]} is out of range for dimension {match[2]} of size {match[3]}"
        if match := BAG.search(text):
            return f"index {match[1]} is out of range: there are {match[2]} rows"
        if OTHERS.search(text):
            found = _offender(event)
            limit, largest = found.get("limit"), found.get("largest")
            if isinstance(limit, int) and isinstance(largest, int):
                value = largest if largest >= limit else found["smallest"]
                return f"index {value} is out of range: {found['function']} has {limit} rows"
            return f"an index is out of range: {text.splitlines()[0][:160]}"
        if "device-side assert" in text and (match := KERNEL.search(run.logs.get(rank, ""))):
            return f"an index is out of range on the GPU: the kernel asserts {match[1][:120]}"
        return ""

    def _notes(self, run: Run, rank: int, event: Event) -> list[str]:
        text = str(event["message"]).splitlines()
        notes = [f"rank {rank}: {event['type']}: {text[0][:240] if text else ''}"]
        found = _offender(event)
        if found:
            notes.append(f"values go from {found['smallest']} to {found['largest']}")
        fall = blame.culprit(run)
        return notes + (blame.others(run, fall) if fall is not None and fall.rank == rank else [])


def _offender(event: Event) -> dict[str, int | str | None]:
    found = event["offender"]
    return found if isinstance(found, dict) and isinstance(found.get("smallest"), int) and isinstance(found.get("largest"), int) else {}
