"""OPT133 clips-nothing: the clip is given no parameters, its iterator was used up before

What it does
    Looks at what `clip_grad_norm_` and `clip_grad_value_` are given. A generator or `filter` object that something else (the optimizer, the
    first clip) has drawn to its end, at most of a statement's clips, is a warning. A list without an element, where no other clip has
    parameters, is advice.

Why it is bad
    `model.parameters()` and `filter(...)` can be drawn from once. The clip then limits no gradient at all, and torch says nothing: the steps are
    taken with what the loss gave, and the script looks as if it were protected.

Wrong
    params = filter(lambda p: p.requires_grad, model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    loss.backward(); clip_grad_norm_(params, 1.0)

Right
    params = [p for p in model.parameters() if p.requires_grad]

Known limits
    Generators, `filter` and `map` are seen through; other iterators (`itertools.chain`) are not.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity, Where
from harness.record import Event, Run

MIN_CLIPS, MOST = 2, 0.5


class ClipsNothing(Check):
    code = "OPT133"
    name = "clips-nothing"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        clips = [(rank, e) for rank, r in enumerate(run.ranks) if r is not None for e in r.of("clip") if e.step < r.num_rows]
        if not clips:
            raise NotApplicable("no gradient clipping")
        by_place: dict[Where | None, list[tuple[int, Event]]] = {}
        for rank, e in clips:
            by_place.setdefault(e.where, []).append((rank, e))
        for where, here in by_place.items():
            used_up, empty = ([(rank, e) for rank, e in here if e["nothing"] == what] for what in ("used up", "empty"))
            if len(used_up) >= max(MIN_CLIPS, MOST * len(here)):
                yield self._found(where, used_up, len(here), "the iterator of parameters was used up before")
                return
            if len(here) == len(empty) >= MIN_CLIPS and all(e["nothing"] for _, e in clips):
                yield self._found(where, empty, len(here), "the collection of parameters is empty", Severity.ADVICE)
                return

    def _found(self, where: Where | None, found: list[tuple[int, Event]], num: int, why: str, severity: Severity | None = None) -> Finding:
        return self.finding(
            f"the clip limits no gradient: {why}",
            where=where,
            ranks=sorted({rank for rank, _ in found}),
            notes=[f"{len(found)} of {num} calls of this statement were given no parameter, and steps followed"],
            help="keep the parameters in a list: `params = [p for p in model.parameters() if p.requires_grad]`, and give it to both",
            severity=severity,
        )
