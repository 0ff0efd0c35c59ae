"""EVL115 best-of-one-shard: one rank decides by a number of its own share which model is kept as the best.

What it does
    Follows the numbers in the condition around torch.save where one rank alone saves. A finding where such a number is what that rank put into a
    reduction (a sum, or the ratio of two), time after time, and never what came out of it.

Why it is bad
    All ranks' results were added up and are shown, but the file is written by the judgement of 1/world_size of the validation data: the checkpoint
    that is called the best is not the one with the best number in the log.

Wrong
    dist.all_reduce(totals)
    if rank == 0 and local_loss < best: torch.save(...)

Right
    loss = totals[0] / totals[1]                      # after the all-reduce
    if rank == 0 and loss < best: torch.save(...)

Known limits
    Numbers of Python's own, in names or attributes; reductions of at most eight elements. A number that is never reduced is not known to be
    a share's. Ranks that each keep a best file of their own are healthy.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import together
from harness.checks.evl import reductions
from harness.checks.evl.reductions import Reduction
from harness.model import Finding, Severity
from harness.record import Event, Run, where_of

NEAR = 2e-6  # a float32 total against Python's own
APART = 1e-4  # so far a share's number has to be from the whole's
MAX_JOINED = 4  # reductions of one measurement


class BestOfOneShard(Check):
    code = "EVL115"
    name = "best-of-one-shard"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        decided = list(run.events("save_decided"))
        sums = [r for r in reductions.aligned(run) if r.kind in ("sum", "avg")]
        if not decided or not sums:
            raise NotApplicable("no rank saves by a number, after numbers were reduced")
        if len({rank for rank, _ in decided}) > 1:
            raise NotApplicable("several ranks save by numbers of their own")
        names: dict[str, list[tuple[Event, bool | None, float]]] = {}
        for rank, event in decided:
            for text, value in event["compared"] or ():
                names.setdefault(str(text), []).append((event, _of_own_share(float(value), rank, event, sums), float(value)))
        for text, told in names.items():
            judged = [(event, own, value) for event, own, value in told if own is not None]
            if judged and all(own for _, own, _ in judged) and len(judged) * 2 > len(told):
                event, _, value = judged[-1]
                yield self._found(text, event, value, len(judged), decided[0][0])
                return

    def _found(self, text: str, event: Event, value: float, num: int, rank: int) -> Finding:
        return self.finding(
            f"what is saved as the best is chosen by `{text}`, a number of rank {rank}'s own share",
            where=where_of(event["at"]) or event.where,
            ranks=(rank,),
            notes=[
                f"it was {value:.6g} at the last save: what this rank put into the all-reduce before, not what came out",
                f"so it was at {num} of the saves that were compared",
            ],
            help="compare the reduced number: the one that all ranks' sums give after the all-reduce",
            evidence={"name": text, "value": value, "saves": num},
        )


def _of_own_share(value: float, rank: int, event: Event, sums: list[Reduction]) -> bool | None:
    """True: what the rank alone measured in this step; False: what the reduction gave; None: neither."""
    before = [r for r in sums if r.at_t(rank) < event.t_ns and r.step(rank) == event.step][-MAX_JOINED:]
    given = [v for r in before for v in r.before[rank]]
    got = [v for r in before for v in r.got(rank)]
    if len(given) != len(got):
        return None
    world = len(before[0].before) if before else 1
    pairs = [*zip(given, got, strict=True), *zip(given, (v / world for v in got), strict=True)]
    pairs += [(given[i] / given[j], got[i] / got[j]) for i in range(len(given)) for j in range(len(given)) if i != j and given[j] and got[j]]
    if any(_near(value, whole, NEAR) for _, whole in pairs):
        return False
    own = [share for share, whole in pairs if _near(value, share, NEAR) and not _near(share, whole, APART)]
    return True if own else None


def _near(a: float, b: float, within: float) -> bool:
    return abs(a - b) <= within * max(abs(a), abs(b))
