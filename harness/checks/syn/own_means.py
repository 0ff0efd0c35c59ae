"""Whether a loss is the mean over the rank's own samples, however it is written: what is still to be done by a check that asks for a division then
is not done by the loss. Shared by the checks of `syn` and `opt`."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import accumulate

from harness.probe.ownmeans import Term
from harness.record import Event, Run, number, where_of

NEAR = 1e-4


def is_plain(run: Run, loss: Event, num_backward: int = 1) -> bool:
    """A mean without a factor; or one of whose terms is one (the factor of another term weighs it against this one), or all of whose terms are together
    (as those of mixup are). With more backwards a step, of micro-batches: the mean over all of them."""
    if not loss["scaled"]:
        return bool(loss["reduction"] == "mean" and num_backward == 1)
    terms, others = list(_terms(loss)), _other_counts(run, loss)
    if loss["joined"] or not terms or (not loss["rows"] and len({t.sizes[0] for t in terms}) > 1):
        return False
    if not any(abs(terms[0].outer * n - 1) < NEAR for n in {1, num_backward}):
        return False
    means = [m * terms[0].outer for m in (_relative_to_mean(t, number(loss["rows"]), others) for t in terms) if m]
    unsure = any(abs(m * n - 1) < NEAR for m in means for n in others)  # both terms of a sum may be divided by the number of ranks
    return any(abs(m * num_backward - 1) < NEAR for m in (*means, 0.0 if unsure else sum(means)))


def bears_no_division(run: Run, loss: Event) -> bool:
    """A mean as above, or one over all micro-batches of a step. Not where these are as many as the ranks: the factor may be for either."""
    num = _num_backward(run, loss)
    return is_plain(run, loss) or (num not in (1, run.world_size) and is_plain(run, loss, num))


def _terms(loss: Event) -> Iterator[Term]:
    """Recordings may be forged."""
    for term in loss["terms"] if isinstance(loss["terms"], list) else ():
        if isinstance(term, list) and len(term) == 4 and all(isinstance(v, (int, float)) for v in term[:2]) and isinstance(term[3], list) and term[3]:
            yield Term(float(term[0]), float(term[1]), term[2] is True, tuple(number(n) for n in term[3]))


def _relative_to_mean(term: Term, own: int, others: set[int]) -> float:
    """1: the mean over what the rank's batch holds, by samples, tokens or elements. 0: that of something else, or not known."""
    rows = term.sizes[0]
    if not rows or (own and (rows % own or (rows > own and rows // own in others))):
        return 0.0
    if term.mean:
        return term.factor
    counts = [c for c in accumulate(term.sizes, operator.mul) if c == rows or c // rows not in others]
    return next((1.0 for c in counts if abs(term.factor * c - 1) < NEAR), term.factor * rows)


def _other_counts(run: Run, loss: Event) -> set[int]:
    """By how many times the batch a loss may be divided on purpose."""
    num = _num_backward(run, loss)
    return {run.world_size, num, run.world_size * num} - {1}


def _num_backward(run: Run, loss: Event) -> int:
    """Backwards a step from the statement of this loss; 1 where they vary."""
    counts = {
        number(n, 1)
        for _, e in run.events("accumulation")
        for site, n in e["sites"] or ()
        if (w := where_of(site)) and loss.where and (w.file, w.line) == (loss.where.file, loss.where.line)
    }
    return counts.pop() if len(counts) == 1 else 1
