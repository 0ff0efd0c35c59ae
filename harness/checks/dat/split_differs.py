"""DAT105 split-differs: the ranks split the data differently, and samples held out on one rank are trained on by another.

What it does
    Compares the index sets of the ranks' `Subset`s, and the content of what is trained on with what is measured on, across ranks.

Why it is bad
    Validation data leaks into training: the measured error is too good, the early stop too late. Under a distributed sampler the ranks'
    shares come from different sets, overlap, and miss samples.

Wrong
    torch.manual_seed(rank); train, val = random_split(data, [0.9, 0.1])

Right
    train, val = random_split(data, [0.9, 0.1], generator=torch.Generator().manual_seed(seed))

Known limits
    Content is compared only where samples are not augmented. A script that measures on its own training data is not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes, together
from harness.checks.dat.passes import Pass
from harness.model import Finding, Severity
from harness.record import Run, number


class SplitDiffers(Check):
    code = "DAT105"
    name = "split-differs"
    severity = Severity.ERROR
    explains = ("DAT102", "DAT110", "DAT114", "EVL104")

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        trained, measured = ([p for p in ps if p.rank < passes.MAX_COMPARED] for ps in (passes.training(run), passes.evaluating(run)))
        if not trained:
            raise NotApplicable("no training pass over a data loader")
        found = (
            self._sets(run, trained) or self._leak(run, trained, measured, _subset_of) or self._leak(run, trained, measured, _content_of)
        )
        if found:
            yield found

    def _sets(self, run: Run, trained: list[Pass]) -> Finding | None:
        """A distributed sampler picks shares from Subsets that are not the same set."""
        for group in passes.aligned(run, [p for p in passes.training(run) if p.distributed is not None and p.subset is not None]):
            sets = [(p.subset or {}).get("set") for p in group]
            if len({repr(s) for s in sets}) > 1 and len({repr((p.subset or {}).get("of")) for p in group}) == 1:
                kept = [set(passes.unpack((p.subset or {}).get("indices"))) for p in group]
                common = len(set.intersection(*kept)) if all(kept) else 0
                return self._found(
                    group,
                    f"the training set is another one on each rank: of the {len(kept[0])} samples to be sharded {common} are common",
                    [],
                )
        return None

    def _leak(
        self, run: Run, trained: list[Pass], measured: list[Pass], what: Callable[[Sequence[Pass], int], dict[int, set[int]]]
    ) -> Finding | None:
        for base in sorted({_base(p) for p in measured} & {_base(p) for p in trained} if what is _subset_of else {-1}):
            train, held = what(trained, base), what(measured, base)
            for rank, kept in held.items():
                own = kept & train.get(rank, set())
                for other, seen in train.items():
                    leaked = kept & seen
                    if other != rank and len(leaked) >= max(2, 0.02 * len(kept)) and len(own) <= 0.05 * len(leaked):
                        group = [p for p in trained if p.rank in (rank, other) and (what is _content_of or _base(p) == base)]
                        return self._found(
                            group,
                            f"{len(leaked)} of the {len(kept)} samples that rank {rank} measures on are trained on by rank {other}",
                            [f"rank {rank} itself trains on {len(own)} of them: each rank made a split of its own"],
                        )
        return None

    def _found(self, group: list[Pass], message: str, notes: list[str]) -> Finding:
        return self.finding(
            message,
            where=group[0].dataset_line(r"split|perm|shuffle|sample\(|choice"),
            ranks=sorted({p.rank for p in group}),
            notes=notes,
            help="split with one seed on all ranks: `random_split(..., generator=torch.Generator().manual_seed(seed))`",
        )


def _base(one: Pass) -> int:
    return number((one.subset or {}).get("base"), -2)


def _subset_of(group: Sequence[Pass], base: int) -> dict[int, set[int]]:
    """Rank -> base indices of its Subsets of one data set."""
    found: dict[int, set[int]] = {}
    for one in group:
        if one.subset is not None and _base(one) == base:
            found.setdefault(one.rank, set()).update(passes.unpack(one.subset.get("indices")))
    return found


def _content_of(group: Sequence[Pass], base: int) -> dict[int, set[int]]:
    """Rank -> digests of the samples; a rank whose samples are not mostly different ones is left out."""
    found: dict[int, set[int]] = {}
    for one in group:
        if len(one.rows) >= 8 and len(set(one.rows)) > 0.9 * len(one.rows):
            found.setdefault(one.rank, set()).update(one.rows)
    return found
