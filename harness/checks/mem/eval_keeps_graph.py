"""MEM102 eval-keeps-graph: an evaluation runs with gradients on, and what it keeps holds the graph of every batch.

What it does
    Counts, while a model is in eval mode, the graphs that its forwards make and that stay alive. As many as there were batches is a
    warning, at the forward. Graphs that a later backward uses were kept on purpose and are not counted.

Why it is bad
    Without a backward nothing frees the activations: the whole test set's activations are in memory at the end of the loop.

Wrong
    model.eval()
    for x, y in test_loader:
        total += criterion(model(x), y)

Right
    model.eval()
    with torch.no_grad():
        for x, y in test_loader:
            total += criterion(model(x), y)

Known limits
    Needs model.eval(), and four batches in one evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Event, Recording, Run, where_of

MIN_KEPT = 4
MIN_AGAIN = 3  # evaluations
SHARE = 0.8  # of the forwards' graphs that are alive at once


class EvalKeepsGraph(Check):
    code = "MEM102"
    name = "eval-keeps-graph"
    severity = Severity.WARNING
    explains = ("MEM101", "MEM103", "MEM104", "MEM105")

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(not e["training"] for r in run.processes for e in r.of("mode")):
            raise NotApplicable("no model was put into eval mode")
        kept = [(rank, r, e) for rank, r in _all(run) for e in r.of("eval_graphs") if _keeps(e, r.of("eval_graphs"))]
        if kept:
            rank, _, event = max(kept, key=lambda item: item[2]["peak"])
            yield self._finding(event, event["peak"], event["forwards"], sorted({k[0] for k in kept}), rank)
            return
        open_ended = [
            (rank, e)
            for rank, r in _all(run)
            for e in r.of("graphs")
            if e["mode"] == "eval" and _alive(e) >= 32 and not r.of("eval_graphs")
        ]
        if open_ended:
            rank, event = max(open_ended, key=lambda item: _alive(item[1]))
            yield self._finding(event, _alive(event), None, sorted({k[0] for k in open_ended}), rank)

    def _finding(self, event: Event, peak: int, forwards: int | None, ranks: list[int], rank: int) -> Finding:
        keeper = where_of(event["keeper"])
        return self.finding(
            f"evaluation keeps the autograd graphs of {peak} batches: it runs without torch.no_grad()",
            where=event.where or keeper,
            ranks=ranks,
            notes=[
                f"rank {rank}: {peak} graphs alive at once" + (f" after {forwards} forwards in eval mode" if forwards else ""),
                *([f"kept by {keeper.place}: {keeper.text}"] if keeper is not None else []),
            ],
            help="put the evaluation under `with torch.no_grad():` (or decorate its function with `@torch.no_grad()`)",
        )


def _all(run: Run) -> list[tuple[int, Recording]]:
    ranks = {id(r): rank for rank, r in enumerate(run.ranks) if r is not None}
    return [(ranks.get(id(r), max(r.env_rank, 0)), r) for r in run.processes]


def _alive(event: Event) -> int:
    value = event["alive"]
    return value if isinstance(value, int) else 0


def _keeps(event: Event, others: list[Event]) -> bool:
    peak, forwards = event["peak"], event["forwards"]
    if not isinstance(peak, int) or not isinstance(forwards, int) or event["used"]:
        return False
    every = [e for e in others if e["peak"] == e["forwards"] and isinstance(e["peak"], int) and e["peak"] >= 2 and not e["used"]]
    again = len(every) >= MIN_AGAIN and peak == forwards  # short evaluations, each of which keeps all it computes
    return (peak >= MIN_KEPT or again) and peak >= 2 and peak >= SHARE * forwards
