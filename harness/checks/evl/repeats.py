"""Indices that the ranks together draw more than once because a sampler of the script's own fills up, and whether what is reduced counts them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.checks.dat import passes
from harness.checks.dat.passes import Pass
from harness.checks.evl import reductions
from harness.checks.evl.reductions import Reduction
from harness.model import Where
from harness.record import Run, number

MIN_SAMPLES, MAX_GROUPS, MAX_DRAWN = 16, 64, 2_000_000
Rows = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Repeated:
    """One evaluation over all ranks that counted samples twice, and the reduction that holds the count."""

    group: list[Pass]
    size: int
    total: int
    summed: Where | None


def counted(run: Run) -> Iterable[Repeated]:
    """Evaluations whose ranks draw a data set and some of its samples again, and reduce a count of all that they drew."""
    whole = [p for p in passes.evaluating(run) if p.exhausted and not p.iterable and not p.opened["replacement"] and p.num_samples]
    groups = passes.aligned(run, whole)[:MAX_GROUPS] if whole else []
    sums = [r for r in reductions.aligned(run) if r.kind in ("sum", "gather")] if groups else []
    for group in groups if sums else ():
        total, size = sum(p.num_samples for p in group), _filled_up(group)
        if size and (at := _count_of_all(run, group, sums, size, total)) is not None:
            yield Repeated(group, size, total, at.where)


def _filled_up(group: Sequence[Pass]) -> int:
    """Samples of the set that the ranks deal out and fill up to equal shares, whole batches or not; 0 where they do something else."""
    read = [_drawn(p) for p in group]
    rows, size = [r for r, _ in read], read[0][1]
    each, batch = len(rows[0]), _batch_of(group[0])
    total = each * len(rows)
    if not MIN_SAMPLES <= size < total <= MAX_DRAWN or {n for _, n in read} != {size} or {len(r) for r in rows} != {each}:
        return 0
    if total not in (_up(size, len(rows)), _up(size, len(rows) * batch)) or len({i for r in rows for i in r}) != size:
        return 0
    return size if _by_own_ends(rows, size) or any(_by_end(rows, chunk, size) for chunk in {1, batch, each}) else 0


def _batch_of(one: Pass) -> int:
    """Size of the first batch; a batch sampler of the script's own tells none."""
    sizes = one.closed["batch_sizes"] if one.closed is not None else None
    return max(1, number(sizes[0]) if isinstance(sizes, list) and sizes else number(one.opened["batch_size"]))


def _drawn(one: Pass) -> tuple[tuple[int, ...], int]:
    """(indices of the samples, size of the data that they index); size 0 where they are not known whole."""
    if len(one.indices) != one.num_samples:
        return (), 0
    if one.subset is None or one.custom:
        return one.indices, one.dataset_len
    base = passes.unpack(one.subset.get("indices"))
    known = len(base) == number(one.subset.get("num")) and all(i < len(base) for i in one.indices)
    return (tuple(base[i] for i in one.indices), number(one.subset.get("of"))) if known else ((), 0)


def _up(size: int, block: int) -> int:
    return -(-size // block) * block


def _by_end(rows: Rows, chunk: int, size: int) -> bool:
    """Dealt out by turns of `chunk`: all samples once, then those of the padding. Shares that overlap, and draws by chance, are no such list."""
    dealt = [i for at in range(0, len(rows[0]), chunk) for row in rows for i in row[at : at + chunk]]
    return len(set(dealt[:size])) == size and _is_padding(dealt[:size], dealt[size:])


def _by_own_ends(rows: Rows, size: int) -> bool:
    """Each rank fills up its own share, with samples of it."""
    own = [tuple(dict.fromkeys(row)) for row in rows]
    shares = sum(len(s) for s in own) == size and all(row[: len(s)] == s for row, s in zip(rows, own, strict=True))
    return shares and all(_is_padding(s, row[len(s) :]) for row, s in zip(rows, own, strict=True))


def _is_padding(first: Sequence[int], rest: Sequence[int]) -> bool:
    """From the start again, the last ones again, or one sample again and again; no choice of samples that are meant to weigh more."""
    again = all(i == first[n % len(first)] for n, i in enumerate(rest))
    return again or len(set(rest)) == 1 or list(rest) == list(first[-len(rest) :])


def _count_of_all(run: Run, group: Sequence[Pass], sums: Sequence[Reduction], size: int, total: int) -> Reduction | None:
    """The reduction behind the evaluation, or those inside of it together, that count what was drawn; None where another one counts the set itself."""
    behind = [r for r in sums if all(is_behind(r, p) for p in group)]
    inside = [r for r in sums if all(_is_inside(r, p) for p in group)]
    counts = [(r, _by_element([r])) for r in behind]
    for where in dict.fromkeys(r.where for r in inside):
        own = [r for r in inside if r.where == where]
        counts.append((own[0], _by_element(own)))
    if any(sum(column) == size for _, columns in counts for column in columns) or _thinned(run, group):
        return None
    drawn = [p.num_samples for p in group]
    return next((r for r, columns in counts for column in columns if _counts(column, drawn, size, total)), None)


def _by_element(series: Sequence[Reduction]) -> list[tuple[float, ...]]:
    """Of each element, what each rank put in, over all of these calls; nothing where they are of unequal length."""
    first = series[0].before
    if len({len(r.after) for r in series}) != 1:
        return []
    return [tuple(sum(r.before[rank][i] for r in series) for rank in range(len(first))) for i in range(len(first[0]))]


def _counts(column: Sequence[float], drawn: Sequence[int], size: int, total: int) -> bool:
    """As many as each rank drew, or as many times the same number (of tokens, of pixels) that the set itself cannot make."""
    each = column[0] / drawn[0]
    whole = each >= 1 and float(each).is_integer() and list(column) == [each * n for n in drawn]
    return whole and (each == 1 or sum(column) % size != 0) and sum(column) == each * total


def is_behind(one: Reduction, p: Pass) -> bool:
    closed = p.closed
    return closed is not None and one.at_t(p.rank) >= closed.t_ns and one.step(p.rank) == closed.step


def _is_inside(one: Reduction, p: Pass) -> bool:
    closed = p.closed
    return closed is not None and p.opened.t_ns < one.at_t(p.rank) < closed.t_ns


def _thinned(run: Run, group: Sequence[Pass]) -> bool:
    """Predictions are gathered as well, and the script may cut them: the count may be one for the log."""
    for p in group:
        recording, closed = run.ranks[p.rank], p.closed
        told = recording.of("gathered") if recording is not None and closed is not None else []
        if any(e["cut"] is not False and number(e["leaves"]) > 8 and e.t_ns > p.opened.t_ns and closed and number(e["at"]) == closed.step for e in told):
            return True
    return False
