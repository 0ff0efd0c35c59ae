"""SYN122 extra-collective: one rank issues a collective that the others do not

What it does
    Counts the collectives that each rank issued up to each optimizer step.

Why it is bad
    The extra call meets the next collective of the others, and everything after it is paired wrongly: wrong numbers, later a
    hang.

Wrong
    if rank == 0: dist.all_reduce(loss)

Right
    dist.all_reduce(loss)                 # on every rank

Known limits
    Needs an optimizer step after the call. Where the run hung there, OUT101 or HNG103 names it. Rounds of local training, in which the ranks take
    steps of their own number between two averages, have no common step to count at; nor have ranks in other roles (a teacher and its students): those
    that make their optimizers at statements of their own, or train models of other shapes. There only the calls themselves are paired.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from harness.checks import regime
from harness.checks.base import Check, NotApplicable
from harness.checks.out import branches
from harness.checks.syn import pairing
from harness.model import Finding, Severity
from harness.probe import protocol
from harness.record import Run, number


class ExtraCollective(Check):
    code = "SYN122"
    name = "extra-collective"
    severity = Severity.ERROR
    explains = ("HNG*", "LAU101", "LAU102", "SYN127", "SYN123", "SYN121", "DAT111", "OPT111", "OUT101")

    def end(self, run: Run) -> Iterable[Finding]:
        pairs = pairing.of(run)
        if run.ending.reason not in ("exited", "hang") or run.live:
            raise NotApplicable("the run was cut off: ranks may be on their way to their next collective")
        if any(e["world"] is False for r in run.present for e in r.of("coll")):
            raise NotApplicable("collectives of subgroups are in use")
        if any(e["op"] in protocol.POINT_TO_POINT for r in run.present for e in r.of("coll")):
            raise NotApplicable("point-to-point messages are in use: the ranks' numbers of calls differ by design")
        if run.ending.reason == "hang" or any(e.code for e in run.ending.exits):
            raise NotApplicable("the run broke: OUT101 and HNG103 look at its collectives")
        if any(True for _ in run.events("join")):
            raise NotApplicable("Join is in use: ranks may take different numbers of steps")
        found = pairing.lone(run, pairs)
        if found is None and _local_epochs(run, pairs):
            raise NotApplicable("the ranks take steps of their own number between the same collectives")
        totals = [0] * run.world_size
        for step in run.steps():
            if not step.complete or _other_roles(run):
                break
            totals = [a + b for a, b in zip(totals, step.number("num_coll"), strict=True)]
            if len(set(totals)) > 1 and len(set(step.number("opt"))) == 1:
                most, least = totals.index(max(totals)), totals.index(min(totals))
                yield self.finding(
                    f"rank {most} has issued {totals[most]} collectives at step {step.index}, rank {least} {totals[least]}",
                    where=(pairing.missed_at(run, found.event) or found.event.where) if found else None,
                    ranks=(most,),
                    notes=["from here on the ranks' collectives are paired wrongly"],
                    help=branches.around(run, found.event).help if found else branches.UNKNOWN,
                )
                return
        if found is not None and len({len(c) for c in pairs.columns}) > 1:
            yield self.finding(
                f"{found.event['op']} is issued on ranks {', '.join(map(str, found.ranks))} only: the ranks' "
                "collectives are paired wrongly from there on",
                where=pairing.missed_at(run, found.event) or found.event.where,
                ranks=found.ranks,
                notes=[f"collectives a rank: {', '.join(str(len(c)) for c in pairs.columns)}"],
                help=branches.around(run, found.event).help,
            )


def _other_roles(run: Run) -> bool:
    """Whether the n-th step of one rank has nothing to do with that of another: without DDP, optimizers made at statements that the ranks do not have in
    common, or that hold other shapes."""
    if any(True for _ in run.events("wrap")) or regime.sharded(run):
        return False
    told = [r.of(protocol.PARAMS) for r in run.present]
    if not all(told):
        return False
    sites = [{(e.where.file, e.where.line) for e in events if e.where is not None} for events in told]
    return (all(sites) and not set.intersection(*sites)) or len({repr(events[0]["shapes"]) for events in told}) > 1


def _local_epochs(run: Run, pairs: pairing.Pairing) -> bool:
    """As many collectives on each rank, at few of the steps, and none of them DDP's, but other numbers of steps, in all or in the rounds between:
    clients that average now and then."""
    if any(True for _ in run.events("wrap")) or len({len(c) for c in pairs.columns}) > 1:
        return False
    if len({r.num_steps for r in run.present}) == 1 and not _rounds(run, pairs):
        return False
    return all(2 * sum(n > 0 for n in r.column("num_coll")) <= r.num_rows for r in run.present)


def _rounds(run: Run, pairs: pairing.Pairing) -> bool:
    """Ranks that end at one step number all the same: call by call they meet at the same statements with as much, several times with all of a model
    (or with objects, whose size nobody told). Where only a condition on a rank's own numbers decides on a call, as much is not a model."""
    if any(len({(pairing.site_key(e), e["op"], e["numel"]) for e in called}) > 1 for called in zip(*pairs.columns, strict=True)):
        return False
    model = min((sum(e["numels"] or ()) for r in run.present for e in r.of(protocol.PARAMS)), default=0)
    moved: Counter[int] = Counter()
    for event in pairs.columns[0]:
        moved[event.step] += number(event["numel"]) if number(event["numel"], -1) >= 0 or "object" not in str(event["op"]) else model
    return model > 0 and sum(n >= model for step, n in moved.items() if step > 0) >= 2
