"""EVL119 chosen-by-each-shard: each rank picks the best of several candidates on its own share, and the results are added up

What it does
    Follows what the ranks add up back in the source: `scores[best]` with `best = scores.argmax()`, where nothing was reduced before the choice
    and `best` also picks something else, a threshold, a temperature, a setting. A finding where the ranks' numbers differ.

Why it is bad
    The sum belongs to no single candidate: every rank contributes the best of its own share. The reported number is too good, and what is
    saved beside it is the choice of one rank.

Wrong
    best = hits.argmax()                                  # hits at each threshold, of this rank's share
    dist.all_reduce(total := hits[best].clone())
    threshold = grid[best]

Right
    dist.all_reduce(hits)
    best = hits.argmax()

Known limits
    Read from the source, within one function. A maximum of each rank that picks nothing else, a reduction by MAX, and a choice after a
    collective are healthy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import together
from harness.checks.evl import reductions
from harness.model import Finding, Severity
from harness.record import Run, where_of


class ChosenByEachShard(Check):
    code = "EVL119"
    name = "chosen-by-each-shard"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        sums = [r for r in reductions.aligned(run) if r.kind in ("sum", "avg")]
        chosen = {r.where: r.events[0]["chosen"] for r in sums if isinstance(r.events[0]["chosen"], Mapping)}
        if not sums:
            raise NotApplicable("no numbers are reduced")
        for one in sums:
            told = chosen.get(one.where)
            if told is None or len(set(one.before)) == 1:
                continue
            at = where_of(told.get("site"))
            yield self.finding(
                f"each rank picks the best of `{told.get('scores')}` on its own share, and what the ranks picked is added up: the sum belongs to no single "
                f"entry of `{told.get('chosen')}`",
                where=at or one.where,
                ranks=run.rank_ids,
                notes=[f"by rank: {', '.join('[' + ', '.join(f'{v:.6g}' for v in b[:4]) + ']' for b in one.before[:4])}"],
                help=f"all-reduce `{told.get('scores')}` before the choice, so that every rank picks the same",
            )
            return
