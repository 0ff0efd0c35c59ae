"""What indices and samples stand for on different ranks, from digests of the samples drawn. Shared by DAT104 and DAT110."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from harness.checks.dat.passes import Pass

MIN_SEEN = 16  # two random halves of as few samples have none in common once in ten thousand times


class Contents:
    """What indices and samples stand for on different ranks."""

    def __init__(self) -> None:
        self.differ = self.compared = self.twice = self.seen = self.relabelled = 0
        self.again = 0  # draws of an index that its rank had drawn before
        self.labelled = self.label_differs = False  # labels are known; some index has another one on another rank
        self.stable = True

    @property
    def agree(self) -> bool:
        """Indices that two ranks drew stand for the same samples."""
        return self.compared >= 4 and not self.differ and self.stable

    @property
    def apart(self) -> bool:
        """The same indices stand for other samples, and no sample is on two ranks: each rank has data of its own. Samples that merely look
        different at each draw are told by a rank's own second draw, or by their labels."""
        return (
            self.stable
            and self.seen >= MIN_SEEN
            and not self.twice
            and self.compared >= 4
            and self.differ == self.compared
            and (self.label_differs or (self.again > 0 and not self.labelled))
        )


def contents_of(drawn: list[Pass]) -> Contents:
    """By the samples' first part; where many of them have that in common (the user of a rating) and shares of the ranks' own may be behind it, by
    this and the label together. Samples are compared with those of one shape."""
    found = _contents_by([p.by_shape(p.rows) for p in drawn], drawn)
    if found.stable and found.differ and not found.seen and all(len(p.labels) == len(p.rows) > 0 for p in drawn):
        whole = _contents_by([tuple(hash(pair) for pair in zip(p.by_shape(p.rows), p.labels, strict=False)) for p in drawn], drawn)
        return whole if whole.apart else found
    return found


def _contents_by(rows_of: list[tuple[int, ...]], drawn: list[Pass]) -> Contents:
    found = Contents()
    table: dict[int, dict[int, int]] = {}  # index -> rank -> content
    label: dict[tuple[int, int], dict[int, int]] = {}  # index and content (which two samples may have in common) -> rank -> label
    per_rank: dict[int, dict[int, set[int]]] = {}  # rank -> content -> indices
    named: dict[int, int] = {}  # index -> label
    shifts = False  # a rank drew a sample again, with another label
    for one, rows in zip(drawn, rows_of, strict=True):
        for position, (index, row) in enumerate(zip(one.by_shape(one.indices), rows, strict=False)):
            ranks = table.setdefault(index, {})
            found.again += one.rank in ranks
            if ranks.setdefault(one.rank, row) != row:
                found.stable = False
            per_rank.setdefault(one.rank, {}).setdefault(row, set()).add(index)
            if position < len(one.labels):
                shifts = label.setdefault((index, row), {}).setdefault(one.rank, one.labels[position]) != one.labels[position] or shifts
                found.labelled = True
                found.label_differs = found.label_differs or named.setdefault(index, one.labels[position]) != one.labels[position]
    if not found.stable:
        return found
    both = [ranks for ranks in table.values() if len(ranks) > 1]
    found.compared = len(both)
    found.differ = sum(1 for ranks in both if len(set(ranks.values())) > 1)
    unique = all(len(indices) == 1 for held in per_rank.values() for indices in held.values())
    if unique and len(per_rank) > 1:
        holders: dict[int, set[int]] = {}
        for held in per_rank.values():
            for row, indices in held.items():
                holders.setdefault(row, set()).update(indices)
        found.seen = len(holders)
        found.twice = sum(1 for indices in holders.values() if len(indices) > 1)
    elif not unique and found.differ < 0.5 * max(1, found.compared):
        found.differ = 0
    if unique:
        found.relabelled = _relabelled_at_once(rows_of, drawn) if shifts else sum(1 for ranks in label.values() if len(set(ranks.values())) > 1)
    return found


def _relabelled_at_once(rows_of: Sequence[tuple[int, ...]], drawn: list[Pass]) -> int:
    """Samples that two ranks drew in one epoch with different labels, of labels that change from epoch to epoch (noise, soft targets): most of
    what both drew, as noise of each rank's own does not make it, and none that a rank itself drew in that epoch with two labels."""
    table: dict[tuple[int, int, int], dict[int, int]] = {}  # epoch, index and content -> rank -> label
    epochs: Counter[int] = Counter()
    for one, rows in zip(drawn, rows_of, strict=True):
        for index, row, label in zip(one.indices, rows, one.labels, strict=False):
            if table.setdefault((epochs[one.rank], index, row), {}).setdefault(one.rank, label) != label:
                return 0
        epochs[one.rank] += 1
    both = [ranks for ranks in table.values() if len(ranks) > 1]
    differ = sum(1 for ranks in both if len(set(ranks.values())) > 1)
    return differ if 2 * differ > len(both) else 0
