"""SYN113 autograd-grad-bypass: torch.autograd.grad, torch.func and gradients written by hand do not fire DDP's hooks

What it does
    Looks for torch.autograd.grad on parameters of a wrapped model, and for steps of its optimizer with gradients that no backward() made, while
    the replicas part and no gradient all-reduce is seen.

Why it is bad
    DDP's hooks fire when a backward() accumulates .grad. torch.autograd.grad and torch.func.grad return gradients without accumulating, and
    `p.grad = g` is a plain assignment: nothing is averaged.

Wrong
    grads = torch.autograd.grad(ddp(x).mean(), ddp.parameters())
    for p, g in zip(ddp.parameters(), grads): p.data -= lr * g

Right
    ddp(x).mean().backward()
    optimizer.step()

Known limits
    Gradient penalties (create_graph=True) are healthy and silent.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run


class AutogradGradBypass(Check):
    code = "SYN113"
    name = "autograd-grad-bypass"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT111", "SYN126", "OPT114", "SYN101")

    def end(self, run: Run) -> Iterable[Finding]:
        if run.world_size < 2:
            raise NotApplicable("one process: there are no replicas to compare")
        if not any(True for _ in run.events("wrap")):
            raise NotApplicable("no model is wrapped in DistributedDataParallel")
        used = list(run.events("autograd_grad"))
        facts = replicas.of(run)
        if not used:
            yield from self._written(run, facts)
            return
        parted = any(p.num_param or p.num_grad for p in facts.partings.values()) or replicas.ends_differ(run)
        if parted and not facts.num_reduce:
            yield self.finding(
                "gradients come from torch.autograd.grad, which DDP does not see: they are never averaged",
                where=used[0][1].where,
                ranks=replicas.rank_list([r for r, _ in used]),
                notes=[f"{used[0][1]['num']} parameters of the wrapped model"],
                help="use loss.backward(), or all-reduce the gradients by hand and divide by the world size",
            )

    def _written(self, run: Run, facts: replicas.Replicas) -> Iterable[Finding]:
        """Gradients that are there at a step without any backward()."""
        written = [(r, e) for r, e in run.events("grad_written") if e["backward"] is False]
        opts = sorted({int(e["opt"]) for _, e in written if (p := facts.partings.get(int(e["opt"]))) and p.num_grad and facts.ddp_names(p.opt)})
        opt = next((o for o in opts if replicas.unaveraged(facts, o) is not None), None)
        if opt is None or facts.num_reduce:
            return
        mine = [(r, e) for r, e in written if e["opt"] == opt]
        yield self.finding(
            "gradients are written to .grad by hand, without a backward() that DDP could see: they are never averaged",
            where=mine[0][1].where,
            ranks=replicas.rank_list([r for r, _ in mine]),
            notes=[
                f"no all-reduce in any of {facts.num_ddp_steps} steps, though the model is wrapped in DDP; gradients differ between ranks at "
                f"{facts.partings[opt].num_grad} of {facts.partings[opt].steps}"
            ],
            help="all-reduce each gradient before it is assigned and divide by the world size, or let loss.backward() make it",
        )
