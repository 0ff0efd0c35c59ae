"""DAT121 shared-permutation-parts: the permutation that all ranks cut their share from is another one on each rank, from some epoch on

What it does
    Compares what `torch.randperm`, `random.shuffle` and numpy's `permutation` and `shuffle` give the ranks, call by call. Equal at first and
    different later, where each rank trains on its share of it alone; names the draws that only some ranks made.

Why it is bad
    Equal seeds hold only as long as every rank draws the same numbers. A preview that rank 0 samples, an evaluation that it runs alone
    (a DataLoader draws the seed of its workers), and the shares come from different permutations: some samples are trained on twice in an epoch,
    others not at all.

Wrong
    order = torch.randperm(n)[rank::world_size]          # equal seeds, every epoch anew
    ...
    if rank == 0: z = torch.randn(16, dim)               # moves on rank 0's generator only

Right
    g = torch.Generator().manual_seed(seed + epoch)      # of its own: nothing else draws from it
    order = torch.randperm(n, generator=g)[rank::world_size]

Known limits
    Ranks that seed differently between two calls, or from the start, are not judged, nor is a permutation of which each rank trains on all.
    What torch itself draws (dropout, the constructor of a layer) moves the generator unseen: the step is told then, and no statement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import permutations, together
from harness.checks.dat.permutations import Drawn
from harness.model import Finding, Severity, Where
from harness.record import Event, Run, number, where_of

OWN = {
    "randperm": "`torch.Generator().manual_seed(seed + epoch)`",
    "random.shuffle": "`random.Random(seed + epoch).shuffle(...)`",
    "permutation": "`np.random.default_rng(seed + epoch).permutation(...)`",
    "shuffle": "`np.random.default_rng(seed + epoch).shuffle(...)`",
}


class SharedPermutationParts(Check):
    code = "DAT121"
    name = "shared-permutation-parts"
    severity = Severity.ERROR
    explains = ("DAT114", "DAT110", "DAT103")

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        found = permutations.of(run)
        if not found:
            raise NotApplicable("no statement of the script draws a permutation twice on every rank")
        for drawn in found:
            parted = _parted_at(drawn)
            if parted is None or _seeded_apart(run, drawn, parted) or not permutations.is_shared_out(run, drawn):
                continue
            odd = _odd_draws(run, drawn, parted)
            yield self.finding(
                f"the permutation that each rank takes its share of is the same on all ranks at first, and another one on each from step "
                f"{min(drawn.steps(parted))} on: the shares overlap, and miss samples",
                where=odd[0][0] if odd else drawn.where,
                ranks=run.rank_ids,
                notes=[
                    *permutations.listed([f"{where.place} drew from the global generator {_counts(nums)}" for where, nums in odd]),
                    *([] if odd else [_unnamed(drawn)]),
                    *([f"the permutation is drawn at {drawn.where.place}"] if odd and drawn.where is not None else []),
                ],
                help="draw it with a generator of its own, seeded alike on all ranks: " + OWN.get(str(drawn.calls[0][0]["fn"]), OWN["randperm"]),
            )
            return


def _unnamed(drawn: Drawn) -> str:
    if drawn.own_generator:
        return "it is drawn from a generator of the script's own: what seeds it holds the rank, or something drew from it on some ranks only"
    return "something between the two calls drew from the global generator on some ranks only"


def _parted_at(drawn: Drawn) -> int | None:
    """The first call that differs, where some were equal before it and none agrees with another rank's after it."""
    equal = [len(set(drawn.digests(k))) == 1 for k in range(drawn.num_common)]
    first = equal.index(False) if False in equal else 0
    if not first or any(equal[first:]):
        return None
    later = [{e["digest"] for e in calls[first:]} for calls in drawn.calls]
    return first if not set.intersection(*later) else None


def _window(events: Iterable[Event], drawn: Drawn, rank: int, k: int) -> list[Event]:
    """Those between the calls k-1 and k of a rank."""
    calls = drawn.calls[rank]
    return [e for e in events if calls[k - 1].t_ns <= e.t_ns <= calls[k].t_ns]


def _seeded_apart(run: Run, drawn: Drawn, k: int) -> bool:
    seeds = [tuple((e["what"], e["value"]) for e in _window(r.of("seed"), drawn, rank, k)) for rank, r in enumerate(run.present)]
    return len(set(seeds)) > 1


def _odd_draws(run: Run, drawn: Drawn, k: int) -> list[tuple[Where, list[int]]]:
    """Statements that drew more often on some ranks than on others between the last equal call and the first that differs."""
    counts: list[Counter[Where]] = []
    for rank, recording in enumerate(run.present):
        told = _so_far(drawn.calls[rank][k])
        told.subtract(_so_far(drawn.calls[rank][k - 1]))
        for e in _window(recording.of("loader"), drawn, rank, k) if drawn.calls[rank][k]["fn"] == "randperm" else ():
            if e.where is not None and not e["made_generator"]:  # it draws the seed of its workers, with or without any
                told[e.where] += 1
        counts.append(told)
    sites = {where for told in counts for where in told}
    odd = [(where, [told[where] for told in counts]) for where in sites if len({told[where] for told in counts}) > 1]
    return sorted(odd, key=lambda one: (min(one[1]) > 0, one[0].line))


def _so_far(event: Event) -> Counter[Where]:
    found: Counter[Where] = Counter()
    for site, num in (pair for pair in event["drawn"] or () if isinstance(pair, list) and len(pair) == 2):
        if (where := where_of(site)) is not None:
            found[where] += number(num)
    return found


def _counts(nums: list[int]) -> str:
    if all(a == b for a, b in pairwise(nums)):
        return f"{nums[0]} times"
    told = [f"{num} time{'s' * (num != 1)} on rank {rank}" if num else f"never on rank {rank}" for rank, num in enumerate(nums[:4])]
    return ", ".join(told) + (", ..." if len(nums) > 4 else "")
