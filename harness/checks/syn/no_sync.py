"""SYN102 step-without-sync: an optimizer step after a backward inside no_sync()

What it does
    At each step of DDP-wrapped parameters, asks whether the forward of the last backward before it ran inside `no_sync()`, or with
    `require_backward_grad_sync` unset, and whether the gradients differ between ranks. Such a step may be rare: the last, shorter window of an epoch. Under
    FSDP2 it looks for gradients that wait unreduced, because `set_requires_gradient_sync(False)` holds, while the optimizer steps. Of the steps without
    digests (from the 256th on, 15 of 16) it asks whether the parameters agree before one and differ after it.

Why it is bad
    Inside `no_sync()` gradients only accumulate locally. The backward that precedes the step has to run outside it, or each rank
    steps with its own gradients and the replicas part. Under FSDP2 the optimizer has no gradient then: the step does nothing, and what waits goes into
    the next window, with that one's factor.

Wrong
    with ddp.no_sync() if i % A != 0 else nullcontext():   # off by one: the wrong micro-batch syncs
        loss.backward()
    if (i + 1) % A == 0: optimizer.step()

Right
    last = (i + 1) % A == 0
    with nullcontext() if last else ddp.no_sync():
        ddp(x).sum().backward()
    if last: optimizer.step()

    last = (i + 1) % A == 0 or i + 1 == len(loader)      # the window that an epoch leaves unfinished has a last micro-batch too

    model.require_backward_grad_sync = last                # before the forward: DDP reads it there
    model(x).sum().backward()

    fsdp.set_requires_gradient_sync(last)                  # FSDP2's

Known limits
    Gradients that a script averages by hand after no_sync() are equal at the step: healthy and silent. So are parameters that it makes equal again
    after each such step. FSDP1's no_sync() is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks.base import Check
from harness.checks.syn import lone_steps, replicas
from harness.model import Finding, Severity, Where
from harness.record import Event, Run, where_of


class StepWithoutSync(Check):
    code = "SYN102"
    name = "step-without-sync"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT111", "SYN126", "OPT114")

    def end(self, run: Run) -> Iterable[Finding]:
        if waiting := list(run.events("unsynced_step")):
            yield self._waiting(run, waiting)
            return
        facts = replicas.require(run, ddp=True)
        flags = [e for _, e in run.events("sync_flag")]
        if not flags and not any(True for _ in run.events("no_sync")):
            return
        alone, mended = lone_steps.apart(run)
        if not alone or mended:
            if not alone and (between := lone_steps.between(run, facts)) is not None:
                yield self._between(run, facts, between)
            return
        row = alone[0].rows[0]
        late = next((e.where for e in flags if e["late"]), None)
        if late is not None:
            yield self.finding(
                f"require_backward_grad_sync is set between forward and backward; DDP reads it in the forward: the gradients of {len(alone)} of "
                f"{facts.num_ddp_steps} optimizer steps were not averaged",
                where=late,
                ranks=run.rank_ids,
                notes=[f"first at step {alone[0].index}, after {row.num_backward if row else 0} backwards"],
                help="set it before the forward, or run forward and backward of all but the last micro-batch inside `with ddp.no_sync():`",
            )
            return
        yield self.finding(
            f"{len(alone)} of {facts.num_ddp_steps} optimizer steps follow a backward inside no_sync(): their gradients were not averaged",
            where=replicas.first_where(run, "no_sync") or replicas.first_where(run, "sync_flag") or facts.grad_site(alone[0].number("opt")[0]),
            ranks=run.rank_ids,
            notes=[f"first at step {alone[0].index}, after {row.num_backward if row else 0} backwards", *_entered(run, facts.grad_site(alone[0].number("opt")[0]))],
            help="leave no_sync() for the last micro-batch: `with nullcontext() if last else ddp.no_sync():`",
        )

    def _waiting(self, run: Run, told: Sequence[tuple[int, Event]]) -> Finding:
        """FSDP2. A step that has gradients too, of a backward that did reduce, may be meant."""
        steps, event = sorted({e.step for _, e in told}), told[0][1]
        empty = all(e["none"] == e["num"] for _, e in told)
        return self.finding(
            f"the optimizer steps while set_requires_gradient_sync(False) holds: the gradients of {event['num']} parameters wait unreduced, "
            + ("and the step has none of them" if empty else "and the step has those of other backwards only"),
            where=event.where,
            ranks=sorted({rank for rank, _ in told}),
            notes=[
                f"at step {', '.join(map(str, steps[:4]))}{' and later' if len(steps) > 4 else ''}; for example {replicas.listed(event['names'] or [])}",
                "what waits is added to the gradients of the next window",
            ],
            help="set_requires_gradient_sync(True) for the last micro-batch of each window, the shorter one at the end of an epoch too",
            severity=Severity.ERROR if empty else Severity.WARNING,
            folds=("OPT101",) if empty else (),
        )

    def _between(self, run: Run, facts: replicas.Replicas, found: lone_steps.Between) -> Finding:
        """Steps without digests."""
        return self.finding(
            f"step {found.first} follows a backward inside no_sync(): its gradients were not averaged, and the replicas part there",
            where=replicas.first_where(run, "no_sync") or replicas.first_where(run, "sync_flag") or facts.grad_site(found.opt),
            ranks=run.rank_ids,
            notes=[
                f"the parameters agree after step {found.equal} and differ after step {found.parted}",
                *_entered(run, facts.grad_site(found.opt)),
                *([f"{len(found.lone)} such steps were seen, as {', '.join(map(str, found.lone[:4]))}"] if len(found.lone) > 1 else []),
            ],
            help="leave no_sync() for the last micro-batch of each window, the shorter one at the end of an epoch too",
        )


def _entered(run: Run, backward: Where | None) -> list[str]:
    """Where the loop enters no_sync() through a helper: there it says which micro-batch is the last."""
    told = next((e for _, e in run.events("no_sync") if e.where is not None), None)
    if told is None or told.where is None or backward is None or _in(told.where, backward):
        return []
    callers = [w for s in told["callers"] or () if (w := where_of(s)) is not None and _in(w, backward)]
    return [f"entered at {callers[0].place}: `{callers[0].text}`"] if callers else []


def _in(one: Where, other: Where) -> bool:
    return (one.file, one.function) == (other.file, other.function)
