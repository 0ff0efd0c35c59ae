"""What a rank reports: printed and logged lines, TensorBoard scalars, and the numbers in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from harness.model import Where
from harness.record import Event, Recording, Run, number

NUMBER = re.compile(r"(?<![\w.])[-+]?\d+\.\d+(?:[eE][-+]?\d+)?|(?<![\w.])[-+]?\d+[eE][-+]?\d+")
ANY_NUMBER = re.compile(r"[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?")
TAGGED = re.compile(
    r"\b(?:client|participant|party|silo|peer|replica)\W{0,2}\d|"
    r"rank\W{0,3}\d|\[\s*\d+\s*(/\s*\d+\s*)?\]|\blocal\b|\bshard\b|\bworker\W{0,2}\d|\bproc\w*\W{0,2}\d|\bgpu\W{0,2}\d", re.IGNORECASE
)
METRIC = re.compile(
    r"loss|acc|err|f1|iou|auc|prec|recall|\bmae\b|\bmse\b|rmse|ppl|perplex|bleu|rouge|score|dice|top-?[15]|metric|val|test|eval|nll|correct|\bmap\b|\bwer\b",
    re.IGNORECASE,
)
TIME = re.compile(r"(time|took|elapsed|speed|lr|learning.rate|throughput|mem\w*|eta)\W{0,3}$", re.IGNORECASE)
UNIT = re.compile(r"^\s*(s\b|sec|ms\b|us\b|min\b|it/s|samples|steps?/|img|GB|MB|GiB|MiB|kB|%?\s*mem)", re.IGNORECASE)


@dataclass(frozen=True)
class Value:
    """A number of a report, as it was written: it stands for everything that rounds to it."""

    value: float
    resolution: float

    def is_near(self, other: float) -> bool:
        return abs(self.value - other) <= 0.5001 * self.resolution + 1e-6 * abs(other)

    def is_far(self, other: float) -> bool:
        """Not what a long sum in single precision makes of it either."""
        return abs(self.value - other) > 0.5001 * self.resolution + 2e-5 * abs(other)

    @property
    def digits(self) -> int:
        """Significant digits."""
        return len(f"{abs(self.value) / self.resolution:.0f}") if self.value else 0


@dataclass(frozen=True)
class Report:
    rank: int
    where: Where | None
    t_ns: int
    step: int
    y: int
    text: str
    kind: str

    @property
    def tagged(self) -> bool:
        """It says itself that it is one rank's."""
        return bool(TAGGED.search(self.text))

    def values(self) -> list[Value]:
        """Numbers with a fraction that are neither times nor learning rates nor sizes."""
        return [_value(match.group()) for match in self._matches]

    @cached_property
    def _matches(self) -> list[re.Match[str]]:
        found = NUMBER.finditer(self.text)
        return [m for m in found if not TIME.search(self.text[: m.start()]) and not UNIT.match(self.text[m.end() :])]

    @cached_property
    def form(self) -> tuple[str, int, str]:
        """What lines have in common that differ by their numbers only: statement and text."""
        at = (self.where.file, self.where.line) if self.where is not None else ("", 0)
        return (*at, " ".join(ANY_NUMBER.sub("#", self.text).split()))

    def between(self, place: int) -> str:
        """What stands between one of `values()` and the next."""
        return self.text[self._matches[place].end() : self._matches[place + 1].start()]

    def label(self, value: Value) -> str:
        """What the line says between the number before it and this one."""
        start = 0
        for match in NUMBER.finditer(self.text):
            if _value(match.group()) == value:
                return self.text[start : match.start()]
            start = match.end()
        return self.text


def _value(text: str) -> Value:
    mantissa, _, exponent = text.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    return Value(float(text), 10.0 ** (int(exponent or 0) - decimals))


def of(recording: Recording, rank: int) -> list[Report]:
    """In order of time."""
    found = [
        Report(rank, e.where, e.t_ns, e.step, number(e["y"]), str(e["text"] or ""), k) for k in ("print", "log") for e in recording.of(k)
    ]
    found += [_scalar(e, rank) for e in recording.of("scalar") if isinstance(e["value"], (int, float))]
    return sorted(found, key=lambda r: r.t_ns)


def _scalar(event: Event, rank: int) -> Report:
    return Report(rank, event.where, event.t_ns, event.step, number(event["y"]), f"{event['tag']} {float(event['value']):.9f}", "scalar")


def all_reports(run: Run) -> list[list[Report]]:
    """Reports of every rank; read once a judgement."""
    found = run.__dict__.get("_reports")
    if not isinstance(found, list):
        found = [of(r, rank) if r is not None else [] for rank, r in enumerate(run.ranks)]
        run.__dict__["_reports"] = found
    return found


def num_ranks_at(run: Run, where: Where | None) -> int:
    """How many ranks report from this statement."""
    table = run.__dict__.get("_report_sites")
    if not isinstance(table, dict):
        table = run.__dict__["_report_sites"] = {}
        for rank, own in enumerate(all_reports(run)):
            for report in own:
                if report.where is not None:
                    table.setdefault((report.where.file, report.where.line), set()).add(rank)
    return len(table.get((where.file, where.line), ())) if where is not None else 0
