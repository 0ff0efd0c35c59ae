"""Whether a loss is the mean over the rank's own samples, however it is written: what is still to be done by a check that asks for a division then
is not done by the loss. Shared by the checks of `syn` and `opt`."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, combinations

from harness.probe.ownmeans import Term
from harness.record import Event, Run, number, where_of

NEAR = 1e-4
MAX_DIMS = 8


def is_plain(run: Run, loss: Event, num_backward: int = 1, whole: bool = False) -> bool:
    """A mean without a factor; or one of whose terms is one (the factor of another term weighs it against this one), or all of whose terms are together
    (as those of mixup are). With more backwards a step, of micro-batches: the mean over all of them. `whole`: over all elements, not the sum over a
    part of each sample."""
    own, others = number(loss["rows"]), _other_counts(run, loss)
    terms = list(_terms(loss))
    if not loss["scaled"]:
        shares = any(t.mean and abs(t.outer * t.factor * n - 1) < NEAR for t in terms for n in others)  # each sample is divided
        return bool(loss["reduction"] == "mean" and num_backward == 1 and not shares)
    if loss["joined"] or not terms or (not own and len({t.sizes[0] for t in terms}) > 1):
        return False
    if not any(abs(terms[0].outer * n - 1) < NEAR for n in {1, num_backward}):
        return False
    means = [m * terms[0].outer for m in (_relative_to_mean(t, own, others, whole) for t in terms) if m]
    unsure = any(abs(m * n - 1) < NEAR for m in means for n in others)  # both terms of a sum may be divided by the number of ranks
    return any(abs(m * num_backward - 1) < NEAR for m in (*means, 0.0 if unsure else sum(means)))


def bears_no_division(run: Run, loss: Event) -> bool:
    """A mean as above, or one over all micro-batches of a step. Not where these are as many as the ranks: the factor may be for either."""
    num = _num_backward(run, loss)
    return is_plain(run, loss) or (num not in (1, run.world_size) and is_plain(run, loss, num))


def may_divide(run: Run, loss: Event) -> bool:
    """Whether a factor of it may stand for the division; a loss whose root is not known is thought to have none."""
    return bool(loss["scaled"] or loss["reduction"] in ("sum", "mean")) and not bears_no_division(run, loss)


def _terms(loss: Event) -> Iterator[Term]:
    """Recordings may be forged."""
    for term in loss["terms"] if isinstance(loss["terms"], list) else ():
        if not (isinstance(term, list) and len(term) == 4 and isinstance(term[3], list) and 0 < len(term[3]) <= MAX_DIMS):
            continue
        if all(isinstance(v, (int, float)) for v in term[:2]):
            yield Term(float(term[0]), float(term[1]), term[2] is True, tuple(number(n) for n in term[3]))


def _relative_to_mean(term: Term, own: int, others: set[int], whole: bool) -> float:
    """1: the mean over what the rank's batch holds, by samples, tokens or elements. 0: that of something else, or not known."""
    rows, elements = term.sizes[0], math.prod(term.sizes)
    if not rows or (own and (rows % own or (rows > own and rows // own in others))):
        return 0.0
    if term.mean:
        return term.factor
    counts = [elements] if whole else list(accumulate(term.sizes, operator.mul))
    if not any(abs(term.factor * c - 1) < NEAR for c in counts):
        return term.factor * (elements if whole else rows)
    # the same number may be another count, times the ranks or the micro-batches: where the batch is known, of its samples
    possible = set(accumulate(term.sizes, operator.mul)) if own else {math.prod(c) for n in range(len(term.sizes) + 1) for c in combinations(term.sizes, n)}
    return 0.0 if any(abs(term.factor * c * n - 1) < NEAR for c in possible for n in others) else 1.0


def _other_counts(run: Run, loss: Event) -> set[int]:
    """By how many times the batch a loss may be divided on purpose."""
    seen = _backwards(run, loss)
    return {run.world_size, *seen, *(run.world_size * n for n in seen)} - {1}


def _num_backward(run: Run, loss: Event) -> int:
    """Backwards a step from the statement of this loss: what is usual."""
    counts = _backwards(run, loss).most_common(1)
    return counts[0][0] if counts else 1


def _backwards(run: Run, loss: Event) -> Counter[int]:
    return Counter(
        number(n, 1)
        for _, e in run.events("accumulation")
        for site, n in e["sites"] or ()
        if (w := where_of(site)) and loss.where and (w.file, w.line) == (loss.where.file, loss.where.line)
    )
