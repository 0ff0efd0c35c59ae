"""SYN138 clipped-on-some-ranks: some ranks clip their gradients, the others step with them as they are

What it does
    Compares, step by step, which ranks called clip_grad_norm_ since the last step, where their gradients or parameters differ at that step.

Why it is bad
    The gradients were equal before the call. Clipped on one rank alone, they are not, and the replicas part at the first norm above the limit.

Wrong
    if rank == 0:
        norms.append(clip_grad_norm_(model.parameters(), 1.0))      # meant to log the norm

Right
    norm = clip_grad_norm_(model.parameters(), 1.0)                 # on every rank
    if rank == 0:
        norms.append(norm)

Known limits
    Sees `torch.nn.utils.clip_grad_norm_`; a norm that is only read (`max_norm=inf`) changes nothing, and is healthy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.lau import blame
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run
from harness.steps import Step


class ClippedOnSomeRanks(Check):
    code = "SYN138"
    name = "clipped-on-some-ranks"
    severity = Severity.ERROR
    explains = ("SYN127", "SYN128", "OPT111", "SYN137")

    def end(self, run: Run) -> Iterable[Finding]:
        replicas.require(run)
        limiting = [(rank, e) for rank, e in run.events("clip") if not _only_reads(e["max_norm"])]
        if not limiting:
            raise NotApplicable("no gradient clipping")
        wrong = [(step.index, some) for step in run.steps() if (some := _some(step)) and not step.same("grad")]
        if len(wrong) < 2 or len({some for _, some in wrong}) > 1:
            return
        index, some = wrong[0]
        where = next((e.where for rank, e in limiting if rank in some and e.where is not None), None)
        if where is None:
            return
        yield self.finding(
            f"the gradients are clipped on {blame.plural(list(some))} of {run.world_size} only: from step {index} on they differ between ranks",
            where=where,
            ranks=some,
            notes=[f"{len(wrong)} steps at which these ranks clipped, the others did not, and the gradients differ"],
            help="call clip_grad_norm_ on every rank, after the gradients were averaged; keep only the logging under `if rank == 0:`",
        )


def _only_reads(limit: object) -> bool:
    return isinstance(limit, (int, float)) and math.isinf(limit)


def _some(step: Step) -> tuple[int, ...]:
    """The ranks whose gradients were clipped before this step, if they are some and not all."""
    if not step.complete:
        return ()
    norms = step.number("grad_norm")
    if sum(map(math.isnan, norms)) in (0, len(norms)):  # the common case, 1,024 ranks in 10 us
        return ()
    return tuple(rank for rank, norm in enumerate(norms) if not math.isnan(norm))
