"""Folds of a cross-validation that are dealt by rank: what one rank holds out, the others train on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.checks.dat import passes
from harness.checks.dat.passes import Pass
from harness.record import Run, number

MANY = 4  # samples held out
MOST = 0.9

Samples = Callable[[Pass], set[tuple[int, int]]]


def by_rank(run: Run) -> bool:
    """Whether the ranks hold out samples apart from each other's, none trains on its own, and others train on them. In data parallelism that would be a
    leak; splits that each rank draws by chance overlap."""
    found = run.__dict__.get("_folds")
    if not isinstance(found, bool):
        trained, held = passes.few(passes.training(run)), passes.few([p for p in passes.all_passes(run) if p.evaluates])
        found = run.__dict__["_folds"] = any(_folds(run, trained, held, of) for of in (_rows, _places))
    return found


def _folds(run: Run, trained: Sequence[Pass], held: Sequence[Pass], of: Samples) -> bool:
    train, out = _tables(run, trained, of), _tables(run, held, of)
    if len(out) < 2 or min(map(len, out)) < MANY or not all(train) or sum(map(len, out)) != len(set().union(*out)):
        return False
    return all(not own & train[i] and _others(train, i, own) >= MOST * len(own) for i, own in enumerate(out))


def _others(train: Sequence[set[tuple[int, int]]], at: int, own: set[tuple[int, int]]) -> int:
    """Samples of these that some other rank trains on."""
    return len(own & set().union(*(t for i, t in enumerate(train) if i != at)))


def _tables(run: Run, told: Sequence[Pass], of: Samples) -> list[set[tuple[int, int]]]:
    """A rank each, the samples of its first pass."""
    first: dict[int, Pass] = {}
    for one in told:
        first.setdefault(one.rank, one)
    return [of(first[rank]) for rank in sorted(first)] if len(first) == min(len(run.present), passes.MAX_COMPARED) else []


def _rows(one: Pass) -> set[tuple[int, int]]:
    return {(0, row) for row in one.rows} if one.distinct else set()


def _places(one: Pass) -> set[tuple[int, int]]:
    """Where the samples stand in the whole data set, beside its length: augmented samples are others each time."""
    part = one.subset
    if part is None:
        return {(one.dataset_len, i) for i in one.indices}
    base = passes.unpack(part.get("indices"))
    return {(number(part.get("of")), base[i]) for i in one.indices if i < len(base)}
