"""SYN137 gradients-synced-now-and-then: gradients are averaged by hand at some steps, and steps are taken without it at the others

What it does
    In a job without DDP whose gradients are reduced by hand, looks for optimizers whose gradients agree at some steps and differ at others,
    again and again, while their parameters never agree any more.

Why it is bad
    A step with a rank's own gradient moves its parameters away from the others'. Averaging the gradients later does not bring them back:
    the ranks train models of their own that now and then get the same push. Only averaging the parameters would.

Wrong
    loss.backward()
    if step % 4 == 0:
        average_gradients(model)
    optimizer.step()

Right
    loss.backward()
    if step % 4 == 3:                     # accumulate in between ...
        average_gradients(model)
        optimizer.step()                  # ... and step with what was averaged
        optimizer.zero_grad()

Known limits
    Needs two returns to equal gradients among the steps that are hashed (the first 256, then every 16th).
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import replicas
from harness.model import Finding, Severity, Where
from harness.record import Run


class GradientsSyncedNowAndThen(Check):
    code = "SYN137"
    name = "gradients-synced-now-and-then"
    severity = Severity.ERROR
    provisional = True
    explains = ("SYN127", "SYN134", "OPT111", "EVL102")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run)
        if facts.wrapped or not any(e["grad"] for _, e in run.events("coll")):
            raise NotApplicable("no hand-written gradient sync")
        for opt, parting in sorted(facts.partings.items()):
            together = parting.steps - parting.num_grad
            if not facts.same_opts or parting.num_returns < 2 or parting.num_param < parting.steps - 1 or parting.num_param <= together:
                continue
            yield self.finding(
                f"gradients are averaged at {together} of {parting.steps} steps only, and every step is taken: the ranks' parameters part for good",
                where=_sync_site(run) or facts.grad_site(opt, parting.grad_step),
                ranks=run.rank_ids,
                notes=[f"parameters differ at {parting.num_param} steps, from step {parting.param_step} on"],
                help="average before every optimizer step, or step only where the gradients were averaged (or average the parameters as well)",
            )
            return


def _sync_site(run: Run) -> Where | None:
    return next((e.where for _, e in run.events("coll") if e["grad"] and e.step >= 1 and e.where is not None), None)
