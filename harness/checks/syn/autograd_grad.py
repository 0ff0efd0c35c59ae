"""SYN113 autograd-grad-bypass: torch.autograd.grad does not fire DDP's hooks

What it does
    Looks for torch.autograd.grad on parameters of a wrapped model while the replicas part and no gradient all-reduce is seen.

Why it is bad
    DDP's hooks fire when .grad is accumulated. torch.autograd.grad returns gradients without accumulating: nothing is averaged.

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
        if not used:
            return
        facts = replicas.of(run)
        parted = any(p.num_param or p.num_grad for p in facts.partings.values()) or replicas.ends_differ(run)
        if parted and not facts.num_reduce:
            yield self.finding(
                "gradients come from torch.autograd.grad, which DDP does not see: they are never averaged",
                where=used[0][1].where,
                ranks=replicas.rank_list([r for r, _ in used]),
                notes=[f"{used[0][1]['num']} parameters of the wrapped model"],
                help="use loss.backward(), or all-reduce the gradients by hand and divide by the world size",
            )
