"""DAT122 passes-drift-apart: the passes of an endless sampler have other lengths on other ranks, so that the ranks are in different epochs

What it does
    Compares at which steps the ranks draw the permutation of their next pass. The permutations are the same on all ranks, pass by pass, each rank
    trains on its share of them, and the steps lie further and further apart.

Why it is bad
    A share of 51 samples is three batches of 17, one of 50 is two. Nothing hangs, since the stream never ends; but the ranks' shares come from
    different permutations at one step, the samples of the shorter passes are drawn more often, and an "epoch" is another one on each rank.

Wrong
    for i in order[rank::world_size]: ...                # one more or less, and then a batch more or less

Right
    per_rank = len(order) // (world_size * batch) * batch
    for i in order[rank::world_size][:per_rank]: ...     # the same number of batches everywhere

Known limits
    Needs three passes, and permutations that the script draws by `torch.randperm`, `random.shuffle` or numpy's functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import permutations, together
from harness.checks.dat.permutations import Drawn
from harness.model import Finding, Severity
from harness.record import Run

MIN_CALLS = 3


class PassesDriftApart(Check):
    code = "DAT122"
    name = "passes-drift-apart"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        found = [d for d in permutations.of(run) if d.num_common >= MIN_CALLS]
        if not found:
            raise NotApplicable("no statement draws a permutation three times on every rank")
        if any(True for _ in run.events("join")):
            raise NotApplicable("Join is in use: ranks may take different numbers of steps")
        for drawn in found:
            if not _drifts(drawn) or not permutations.is_shared_out(run, drawn):
                continue
            passes = [b - a for a, b in zip(drawn.steps(0), drawn.steps(1), strict=True)]
            last = drawn.num_common - 1
            yield self.finding(
                "a pass over its share has "
                + ", ".join(f"{n} steps on rank {rank}" for rank, n in enumerate(passes[:4]))
                + f": the ranks part at step {min(drawn.steps(1))} and are in different permutations of the data from then on",
                where=drawn.cut or drawn.where,
                ranks=run.rank_ids,
                notes=[
                    "pass "
                    + f"{last} begins at step "
                    + ", ".join(f"{s} on rank {rank}" for rank, s in enumerate(drawn.steps(last)[:4])),
                ],
                help="give every rank the same number of batches in a pass: cut the shares to `n // (world_size * batch) * batch`, or pad them",
            )
            return


def _drifts(drawn: Drawn) -> bool:
    """The same permutations everywhere, a new one each time, drawn at steps that lie ever further apart."""
    calls = range(drawn.num_common)
    if any(len(set(drawn.digests(k))) != 1 for k in calls) or len({drawn.digests(k)[0] for k in calls}) < len(calls):
        return False
    spread = [max(drawn.steps(k)) - min(drawn.steps(k)) for k in calls]
    return spread[0] == 0 and spread[1] > 0 and all(b > a for a, b in pairwise(spread))
