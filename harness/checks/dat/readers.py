"""What each loader worker of each rank read of a stream, and which of them read the same: those of one rank, those whose rank and number have one sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from harness.checks.dat.passes import MAX_COMPARED, Pass
from harness.record import number

MIN_DIFFERENT = 16  # samples in a reader's share, by content: fewer may be equal by chance
MOSTLY = 0.9
Share = Counter[int]


def shares(one: Pass, *, left: bool = False) -> list[Share]:
    """Of each worker, where all ran equally long: then the batches come from them in turn. Empty where that is not so, or not known. `left`: also of a
    pass that was left while all batches were whole, as one over an endless stream is."""
    workers, sizes = number(one.opened["num_workers"]), one.closed["batch_sizes"] if one.closed is not None else None
    size = number(one.opened["batch_size"])
    rounds, over = divmod(one.num_batches, workers) if workers > 1 else (0, 1)
    last = number(sizes[2]) if isinstance(sizes, list) and len(sizes) == 3 else 0
    if left and not one.complete and one.num_batches * size == one.num_samples:
        over, last = 0, size
    elif not one.complete or workers * ((rounds - 1) * size + last) != one.num_samples:
        return []
    if over or not rounds or not size:
        return []
    rows, found, at = one.rows, [Counter[int]() for _ in range(workers)], 0
    for nth in range(rounds * workers if len(rows) == one.num_samples else 0):
        end = at + (size if nth < (rounds - 1) * workers else last)
        found[nth % workers].update(rows[at:end])
        at = end
    return found if all(len(f) >= MIN_DIFFERENT for f in found) else []


def echo(one: Pass) -> bool:
    """Whether all workers of a rank read the same in the same order, as copies of a stream do that do not ask for their number."""
    found = [list(share.items()) for share in shares(one)]  # in the order in which they came first
    return len(found) > 1 and all(f == found[0] for f in found[1:])


def in_turn(one: Pass) -> bool:
    """Whether each worker by itself gives every sample several times, all equally often: numbers of classes in turn, or data that go round."""
    counts = [share.values() for share in shares(one)]
    return bool(counts) and all(min(c) > 1 and max(c) - min(c) <= 1 for c in counts)


def collide(group: Sequence[Pass]) -> int:
    """Samples that a reader has in common with one of another rank: two of the ranks' workers read the same exactly where rank + worker
    is the same number. 0 for anything else."""
    read = [(p.rank + w, p.rank, share) for p in group[:MAX_COMPARED] for w, share in enumerate(shares(p, left=True))]
    if not read or len({rank for _, rank, _ in read}) < min(len(group), MAX_COMPARED):
        return 0
    keys = [(total, hash(frozenset(share.items()))) for total, _, share in read]
    if any((a[0] == b[0]) != (a[1] == b[1]) for a, b in combinations(set(keys), 2)) or len(set(keys)) == len(keys):
        return 0
    twice = Counter(total for total, _, _ in read)
    return next(share.total() for total, _, share in read if twice[total] > 1)


class Twins(NamedTuple):
    """The first rank's first worker, and one of another rank that reads what it reads."""

    rank: int
    worker: int
    common: int
    num: int


def twins(group: Sequence[Pass]) -> Twins | None:
    """Where every worker of every rank has one on another rank that reads nearly the same samples, and others that read other samples."""
    read = [(p.rank, w, set(share), share.total()) for p in group[:MAX_COMPARED] for w, share in enumerate(shares(p))]
    if not read or len({rank for rank, *_ in read}) < min(len(group), MAX_COMPARED) or any(len(own) < MOSTLY * num for _, _, own, num in read):
        return None
    others = [[(o, len(one[2] & o[2])) for o in read if o[0] != one[0]] for one in read]
    alike = [[n >= MOSTLY * min(len(one[2]), len(o[2])) for o, n in found] for one, found in zip(read, others, strict=True)]
    if not all(any(a) and not all(a) for a in alike):
        return None
    (rank, worker, _, _), common = others[0][alike[0].index(True)]
    return Twins(rank, worker, common, read[0][3])
