"""HNG103 collectives-do-not-match: ranks wait in different collectives.

What it does
    In a run that stands still, or that broke because sizes do not fit (gloo aborts the rank that receives too much), at least two ranks are
    in calls that cannot meet: another operation, or the same one at another line while nobody else is missing. An error.

Why it is bad
    A collective ends when all ranks have called it. Ranks that took different branches wait for ever, each for the call that the other
    skipped, or add up numbers that do not belong together.

Wrong
    if rank == 0:
        dist.broadcast(stats, src=0)      # rank 1 is already in the next all_reduce

    for label in sorted(seen_on_this_rank): dist.all_reduce(counts[label])     # as many calls as this rank has seen labels

    for batch, total in reduced(loader):      # a generator with an all_reduce for each batch
        if len(rows) >= 16: break             # rows are collected on rank 0 only: it leaves, the others draw on

Right
    dist.broadcast(stats, src=0)          # on every rank

Known limits
    Says where the ranks are, not why they parted. The cause may lie earlier: batches that differ in number, a decision that each rank
    takes alone. Where one rank went through a loop of collectives more often than another, the loop is named; where that loop is a generator's over a
    data loader, and a rank gave it up before its end, the loop that draws from the generator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks.base import Check
from harness.checks.hng import generators, waits
from harness.checks.lau import blame
from harness.model import Finding, Severity, Where
from harness.record import Event, Run, where_of


class CollectivesDoNotMatch(Check):
    code = "HNG103"
    name = "collectives-do-not-match"
    severity = Severity.ERROR
    substantial = False
    explains = ("HNG101", "LAU101", "LAU102", "LAU122", "LAU124")

    def end(self, run: Run) -> Iterable[Finding]:
        broken = waits.broken(run)
        if not (found := broken or waits.require_hang(run)):
            return
        waiting = [w for w in found if w.peers and w.op not in ("init", "store")]
        if len({(w.op, w.place) for w in waiting}) < 2:
            return
        if len({w.op for w in waiting}) == 1 and any(not w.peers and w.op != "ended" for w in found):
            return  # one call on two lines (an if/else around it) can meet: it waits for those who are elsewhere
        odd = waits.odd_one_out(waiting)
        rounds, loop = _rounds(run, odd)
        drawn = generators.find(run, waiting, odd, loop) if loop is not None else None
        how = "met in collectives that do not fit" if broken else "wait in collectives that cannot meet"
        left = f", for {blame.plural(list(drawn.left))} left a generator that holds collectives before its end" if drawn is not None and drawn.left else ""
        yield self.finding(
            f"ranks {how}{left}: {waits.describe(waiting)}",
            where=(drawn.where if drawn is not None and drawn.left else None) or loop or odd.where,
            ranks=[w.rank for w in waiting],
            notes=[*rounds, *([drawn.note] if drawn is not None else []), *waits.notes(found)],
            help=_help(loop, drawn),
        )


def _help(loop: Where | None, drawn: generators.Consumer | None) -> str:
    if drawn is not None and drawn.left:
        return (
            "a generator stops where its caller stops drawing: let all ranks leave this loop at the same turn (by a number that is the same on all of them, or "
            "by a decision that was reduced), or draw to the end on every rank"
        )
    leave = ", and be left at the same turn by all of them" if drawn is not None else ""
    return "make every rank call the same collectives in the same order: " + (
        f"let this loop run over something that is the same on all of them{leave}" if loop else "take this call out of the branch, or add it to the other one"
    )


def _rounds(run: Run, odd: waits.Wait) -> tuple[list[str], Where | None]:
    """Where ranks made different numbers of calls from the odd one's statement since the last step: those, and the loop around it."""
    told = next((e for _, e in run.events("coll_site") if _at(e, odd)), None)
    loop = where_of(told["loop"]) if told is not None else None
    counts = {rank: _calls(r.of("coll"), odd) for rank, r in enumerate(run.ranks) if r is not None}
    if loop is None or min(counts.values()) == 0 or len(set(counts.values())) == 1:
        return [], None
    return [f"calls at line {odd.where.line if odd.where else 0} since the last step: " + ", ".join(f"rank {r}: {n}" for r, n in list(counts.items())[:8])], loop


def _calls(events: Sequence[Event], odd: waits.Wait) -> int:
    return sum(e.step == odd.step and _at(e, odd) for e in events)


def _at(event: Event, wait: waits.Wait) -> bool:
    return event.where is not None and wait.where is not None and (event.where.file, event.where.line) == (wait.where.file, wait.where.line)
