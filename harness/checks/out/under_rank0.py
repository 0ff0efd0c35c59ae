"""OUT101 collective-under-rank-0: a collective is called by some ranks only, and the run hung or broke there

What it does
    Looks for the collective in which ranks wait, and whether other ranks ever came to that statement. The forward of a model in DDP is one too: it
    broadcasts the buffers. Where a rank stands in it under a condition on the rank, it is that forward, whatever the others wait in.

Why it is bad
    A collective needs every rank. Under `if rank == 0:`, in a branch that asks for a rank's own data, or in the handler of an exception that one rank
    raised, the others go on to the next one, or to the end: a hang, or a closed connection.

Wrong
    if rank == 0:
        dist.barrier()
        save(model)

    if rank == 0:
        validate(ddp_model)               # with batch norm: every forward broadcasts its buffers

    except FloatingPointError:
        dist.all_reduce(skipped)          # the ranks whose loss is finite are in their backward

Right
    if rank == 0: save(model)
    dist.barrier()

    if rank == 0: validate(ddp_model.module)

    bad = (~torch.isfinite(loss)).float()
    dist.all_reduce(bad)                  # on every rank, then all skip or none
    if bad: continue

Known limits
    A broadcast whose source and receivers stand on two lines is healthy. Silent where the run ended well. Of several branches around the
    call the one on the rank is named, else the innermost: a handler only where it is that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import parting
from harness.checks.hng import waits
from harness.checks.lau import blame
from harness.checks.out import branches, lone_forward
from harness.checks.out.lone_forward import LoneForward
from harness.checks.syn import pairing
from harness.model import Finding, Severity
from harness.record import Run


class CollectiveUnderRank0(Check):
    code = "OUT101"
    name = "collective-under-rank-0"
    severity = Severity.ERROR
    explains = ("HNG*", "LAU101", "LAU102", "LAU124", "SYN122", "SYN123")

    def end(self, run: Run) -> Iterable[Finding]:
        forward = lone_forward.find(run)
        if forward is not None:
            yield self._forward(forward, run)
            return
        pairs = pairing.of(run)
        if run.ending.reason not in ("exited", "hang") or run.live:
            raise NotApplicable("the run was cut off: ranks may be on their way to their next collective")
        if any(e["world"] is False for r in run.present for e in r.of("coll")):
            raise NotApplicable("collectives of subgroups are in use")
        if run.ending.reason != "hang" and not any(e.code and not e.by_us for e in run.ending.exits):
            return  # a lone collective in a run that ended well is SYN122
        found = pairing.lone(run, pairs)
        if found is not None and not blame.fell_alone(run) and not _held_up(run, found.missing) and not _on_their_way(run, found):
            exit_at = pairing.missed_at(run, found.event)
            past = [f"it is at {found.event.where.place}; the way past it is `{exit_at.text}`"] if exit_at and found.event.where else []
            around = branches.around(run, found.event)
            rest = f"{blame.plural(list(found.missing))} never {'comes' if len(found.missing) == 1 else 'come'} to this statement"
            yield self.finding(
                f"{found.event['op']} is called {'in an exception handler, ' if around.handler else ''}on {blame.plural(list(found.ranks))} only; {rest}",
                where=exit_at or found.event.where,
                ranks=found.ranks,
                notes=[*past, *around.notes, f"collective {found.n} there", *waits.standing(run)],
                help=around.help,
            )

    def _forward(self, one: LoneForward, run: Run) -> Finding:
        some, rest = ", ".join(map(str, one.ranks)), ", ".join(map(str, one.missing))
        does = "which broadcasts the model's buffers" if one.buffers else "which all ranks have to make together"
        return self.finding(
            f"the model in DistributedDataParallel is called on rank {some} only, {does}: rank {rest} never comes to this forward",
            where=one.where,
            ranks=one.ranks,
            notes=[f"it stands under `{one.condition.text}` ({one.condition.place}); the forward is at {one.inner.place}", *waits.standing(run)],
            help="call the plain model on one rank (`model.module`), or let all ranks evaluate",
        )


def _on_their_way(run: Run, found: pairing.Lone) -> bool:
    """Whether the missing ranks are still in the loops of their steps, before the statement: they take more steps than the others, and skip nothing."""
    parted = parting.find(run)
    return parted is not None and parted.ahead and set(found.missing) <= set(parted.stayed)


def _held_up(run: Run, missing: Sequence[int]) -> bool:
    """Whether a missing rank never got to choose: it stands still in code of its own, or was ended by os._exit()."""
    if run.ending.reason == "hang" and any(w.rank in missing and not w.peers and w.op != "ended" and w.where for w in waits.waits(run)):
        return True
    recordings = [run.ranks[rank] for rank in missing if rank < len(run.ranks)]
    return any(r is not None and any(e["how"] == "os._exit" for e in r.of("exit_call")) for r in recordings)
