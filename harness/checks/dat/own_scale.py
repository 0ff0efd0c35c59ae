"""DAT125 inputs-scaled-by-own-share: each rank scales its inputs by the mean and deviation of its own share of the data.

What it does
    Looks at what the wrapped model is fed: where every rank's inputs have, at the end of a pass, the mean 0 and the deviation 1 in their columns to
    the last digits, while the shares differ, each was scaled by its own constants. The source must show that these are made once, of a part that
    the rank cuts out (`x[rank * n : (rank + 1) * n]`, `files[rank::world]`). A warning where the constants could be read and differ by more
    than a tenth of a deviation between ranks, advice where they could not be read.

Why it is bad
    The model is one, and the same raw value reaches it as another number on each rank. What the shares differ in is taken out of the data, and the
    constants that rank 0 saves fit its own share alone: at inference the other shares' inputs come out shifted.

Wrong
    mine = x[rank * n : (rank + 1) * n]
    mine = (mine - mine.mean(0)) / mine.std(0)

Right
    mean, std = x.mean(0), x.std(0)              # of all rows, where each rank has them
    total = torch.stack([mine.sum(0), mine.square().sum(0)]); dist.all_reduce(total)     # where it has not

Known limits
    Looks at inputs of two or three dimensions and 65536 numbers, at passes of up to 256 forwards that leave out no row. A share that is picked whole
    (`sites[rank]`, `f"site_{rank}.csv"`), and one whose parts are scaled one by one in a loop, may well have a scale of its own: silent.
    Minimum and maximum, and a scaled target alone, are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks.base import Check
from harness.checks.dat import together
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Event, Run, number, where_of

APART = 0.1  # of a standard deviation; less than that is what two shares of one shuffled set differ by
EQUAL = 1e-6
TINY = 1e-30


class OwnScale(Check):
    code = "DAT125"
    name = "inputs-scaled-by-own-share"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        facts = replicas.require(run, ddp=True)
        told = [events[0] for r in run.present if (events := r.of("own_scale"))]
        if not facts.num_reduce or len(told) < run.world_size or not set.intersection(*({*map(int, e["after"] or ())} for e in told)) or not _differ(told):
            return
        gap = _largest_gap(told)
        if gap is None or gap[0] > APART:
            yield self._found(run, told, gap)

    def _found(self, run: Run, told: Sequence[Event], gap: tuple[float, str] | None) -> Finding:
        applied = where_of(told[0]["applied"])
        rows = ", ".join(str(e["rows"]) for e in told[:8])
        return self.finding(
            "each rank scales its inputs by the mean and standard deviation of its own share: the one model sees the same value as other numbers on"
            f" each rank{'; ' + gap[1] if gap else ''}",
            where=told[0].where,
            ranks=run.rank_ids,
            notes=[
                f"{told[0]['columns']} of {told[0]['of']} columns have mean 0 and deviation 1 on every rank after its own {rows} rows, which differ",
                *([f"scaled at line {applied.line}"] if applied else []),
            ],
            help="make the constants of all rows: before the cut, or all_reduce the sums of rows, squares and counts; save those",
            severity=None if gap else Severity.ADVICE,
        )


def _differ(told: Sequence[Event]) -> bool:
    """The ranks have other rows: their sums of cubes differ, which does not ask for the order."""
    sums = [[float(v) for v in e["thirds"] or ()] for e in told]
    first = sums[0]
    return all(len(s) == len(first) and any(abs(a - b) > EQUAL * (1 + abs(a)) for a, b in zip(first, s, strict=True)) for s in sums[1:])


def _largest_gap(told: Sequence[Event]) -> tuple[float, str] | None:
    """How far the constants of two ranks are apart, in deviations, and that in words; None where they could not be read on every rank."""
    tables = [[s for s in e["scales"] or () if len(s["mean"]) in (1, number(e["of"]))] for e in told]
    if not all(tables) or len({len(t) for t in tables}) != 1:
        return None
    best = (0.0, "")
    for scales in zip(*tables, strict=True):
        if len({(s["name"], len(s["mean"])) for s in scales}) != 1:
            return None
        for column, means in enumerate(zip(*(map(float, s["mean"]) for s in scales), strict=True)):
            spreads = [abs(float(s["std"][column])) for s in scales]
            apart = max(max(means) - min(means), max(spreads) - min(spreads)) / max(*spreads, TINY)
            if apart > best[0]:
                shown = ", ".join(f"{m:.4g} +- {s:.4g} (rank {r})" for r, (m, s) in enumerate(list(zip(means, spreads, strict=True))[:4]))
                best = (apart, f"column {column} of `{scales[0]['name']}` is {shown}")
    return best
