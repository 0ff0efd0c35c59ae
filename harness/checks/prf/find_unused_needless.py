"""PRF105 find-unused-needless: DDP searches for unused parameters in every step, and there are none.

What it does
    Where find_unused_parameters is on and the graph is not static, walks from the loss of the first 16 backwards (then of every eighth)
    to the parameters that it reaches. All of them on every rank, over at least 8 backwards, is a warning.

Why it is bad
    The search walks the whole graph before each backward and an extra all-reduce tells the ranks what was used: a step costs 1.3 to 1.75
    times as much for small models.

Wrong
    model = DDP(net, find_unused_parameters=True)      # "to be safe"

Right
    model = DDP(net)

Known limits
    A branch that is taken less than once in 16 steps can be missed. Reentrant checkpoints hide parameters, and such runs stay silent.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.model import Finding, Severity
from harness.record import Event, Run

MIN_LOOKS = 8


class FindUnusedNeedless(Check):
    code = "PRF105"
    name = "find-unused-needless"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        searching = [(rank, e) for rank, e in run.events("wrap") if e["find_unused"] and not e["static_graph"]]
        if not searching:
            if not any(True for _ in run.events("wrap")):
                raise NotApplicable("no model is wrapped in DistributedDataParallel")
            return
        looks: dict[int, dict[int, list[Event]]] = {}
        for rank, event in run.events("used"):
            if isinstance(event["index"], int):
                looks.setdefault(event["index"], {}).setdefault(rank, []).append(event)
        judged = 0
        for index in sorted({e["index"] for _, e in searching if isinstance(e["index"], int)}):
            ranks = looks.get(index, {})
            wanted = {rank for rank, e in searching if e["index"] == index}
            if set(ranks) != wanted or any(len(events) < MIN_LOOKS for events in ranks.values()):
                continue
            judged += 1
            if all(e["num_unused"] == 0 and e["complete"] for events in ranks.values() for e in events):
                event = next(e for _, e in searching if e["index"] == index)
                num = sum(len(events) for events in ranks.values())
                yield self.finding(
                    "find_unused_parameters=True, but every parameter is used in every step",
                    where=event.where,
                    ranks=sorted(wanted),
                    notes=[f"all {ranks[min(wanted)][0]['num']} parameters were reached in {num} of {num} backwards looked at"],
                    help="remove `find_unused_parameters=True`",
                )
        if not judged:
            raise Inconclusive(f"needs {MIN_LOOKS} backwards on every rank")
