"""SYN102 step-without-sync: an optimizer step after a backward inside no_sync()

What it does
    At each step of DDP-wrapped parameters, asks whether the forward of the last backward before it ran inside `no_sync()`, or with
    `require_backward_grad_sync` unset, and whether the gradients differ between ranks.

Why it is bad
    Inside `no_sync()` gradients only accumulate locally. The backward that precedes the step has to run outside it, or each rank
    steps with its own gradients and the replicas part.

Wrong
    with ddp.no_sync() if i % A != 0 else nullcontext():   # off by one: the wrong micro-batch syncs
        loss.backward()
    if (i + 1) % A == 0: optimizer.step()

Right
    last = (i + 1) % A == 0
    with nullcontext() if last else ddp.no_sync():
        ddp(x).sum().backward()
    if last: optimizer.step()

    model.require_backward_grad_sync = last                # before the forward: DDP reads it there
    model(x).sum().backward()

Known limits
    Gradients that a script averages by hand after no_sync() are equal at the step: healthy and silent.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.probe.protocol import FLAG_DDP, FLAG_NO_SYNC
from harness.record import Run


class StepWithoutSync(Check):
    code = "SYN102"
    name = "step-without-sync"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT111", "SYN126", "OPT114")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run, ddp=True)
        flags = [e for _, e in run.events("sync_flag")]
        if not flags and not any(True for _ in run.events("no_sync")):
            return
        alone = [
            s
            for s in run.steps()
            if s.complete and all(f & FLAG_NO_SYNC and f & FLAG_DDP for f in s.number("flags")) and not s.same("grad")
        ]
        if not alone:
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
            notes=[f"first at step {alone[0].index}, after {row.num_backward if row else 0} backwards"],
            help="leave no_sync() for the last micro-batch: `with nullcontext() if last else ddp.no_sync():`",
        )
