"""EVL104 eval-on-all-ranks: every rank measures on the whole test set.

What it does
    Compares what the ranks measure on.

Why it is bad
    It is right, and costs world_size times the work: the same number, computed N times.

Wrong
    loader = DataLoader(test_set)                       # on every rank

Right
    loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)))      # and all-reduce the sums

Known limits
    Advice only: for small sets it is the simplest way, and as fast. A measurement behind a step by which the ranks share no gradient (a search by rank) is
    of another model on each.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import together
from harness.checks.evl import evaluations
from harness.checks.evl.evaluations import Evaluation
from harness.checks.syn import members
from harness.model import Finding, Severity
from harness.record import Run


class EvalOnAllRanks(Check):
    code = "EVL104"
    name = "eval-on-all-ranks"
    severity = Severity.ADVICE

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        groups = evaluations.aligned(run)
        if not groups:
            raise NotApplicable("no evaluation that all ranks took part in")
        same = [g for g in groups if evaluations.whole(g) and g[0].num_samples >= 8 and not _in_train_mode(g[0])]
        same = [g for g in same if not members.apart(run, [g[0].step - 1])]
        if same:
            first = same[0][0]
            yield self.finding(
                f"all {run.world_size} ranks evaluate the same {first.num_samples} samples",
                where=(first.one.made if first.one is not None else None) or first.where,
                ranks=run.rank_ids,
                notes=[f"{len(same)} evaluations, the same work {run.world_size} times each"],
                help="let each rank evaluate every world_size-th sample, and all-reduce the sums; or evaluate on rank 0 alone",
            )


def _in_train_mode(one: Evaluation) -> bool:
    """No measurement, or one that EVL106 speaks of: statistics of BatchNorm are computed anew so, by every rank on purpose."""
    return one.one is not None and one.one.closed is not None and bool(one.one.closed["training"])
