"""SYN118 none-grad-asymmetric: a hand-written sync skips parameters that have no gradient on this rank

What it does
    Compares which gradients each rank gives to a collective between two steps.

Why it is bad
    `if p.grad is not None: all_reduce(p.grad)` pairs the ranks' collectives wrongly as soon as one rank has a gradient more: gloo
    aborts without a traceback, or the wrong gradients are added.

Wrong
    for p in model.parameters():
        if p.grad is not None: dist.all_reduce(p.grad)

Right
    for p in model.parameters():
        if p.grad is None: p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)

Known limits
    Sees the first five steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import pairing
from harness.model import Finding, Severity
from harness.record import Event, Run


class NoneGradAsymmetric(Check):
    code = "SYN118"
    name = "none-grad-asymmetric"
    severity = Severity.ERROR
    provisional = True
    explains = ("LAU101", "LAU102", "HNG*", "SYN122", "SYN123", "SYN121", "SYN127", "DAT111", "OUT101")

    def end(self, run: Run) -> Iterable[Finding]:
        if run.world_size < 2:
            raise NotApplicable("one process")
        columns = {rank: [e for e in r.of("coll") if e["grad"]] for rank, r in enumerate(run.ranks) if r is not None}
        if sum(bool(c) for c in columns.values()) < 2:
            raise NotApplicable("no hand-written gradient sync")
        if pairing.lone(run, pairing.of(run)) is not None:
            return  # another collective, on some ranks only, broke the pairing: the gradients merely follow
        steps = {rank: Counter(e.step for e in c) for rank, c in columns.items()}
        reached = min(r.num_steps for r in run.present)
        failed = any(e.code for e in run.ending.exits) or run.ending.reason == "hang"
        for step in sorted({s for counter in steps.values() for s in counter if s <= reached}):
            counts = {rank: s[step] for rank, s in steps.items()}
            sizes = {rank: [e["numel"] for e in columns[rank] if e.step == step] for rank in columns}
            short = min(len(v) for v in sizes.values())
            paired = short > 0 and len({tuple(v[:short]) for v in sizes.values()}) == 1
            if failed and not paired and short and not _meet(run, step):
                yield self._met(columns, step, next(i for i in range(short) if len({v[i] for v in sizes.values()}) > 1))
                return
            if len(set(counts.values())) > 1 and (failed or not paired) and not _meet(run, step):
                fewest = min(counts, key=lambda r: counts[r])
                yield self.finding(
                    f"rank {fewest} synchronises {counts[fewest]} gradients at step {step}, the others up to {max(counts.values())}",
                    where=columns[max(counts, key=lambda r: counts[r])][0].where,
                    ranks=(fewest,),
                    notes=[f"gradients synchronised a rank: {', '.join(f'{r}: {c}' for r, c in sorted(counts.items()))}"],
                    help="give every parameter a gradient before the loop: `if p.grad is None: p.grad = torch.zeros_like(p)`",
                )
                return

    def _met(self, columns: dict[int, list[Event]], step: int, nth: int) -> Finding:
        """The first call of a step in which gradients of different sizes meet; the run broke there, so the numbers of calls do not tell."""
        here = {rank: [e for e in c if e.step == step][nth] for rank, c in columns.items()}
        one = min(here)
        other = next(rank for rank in here if here[rank]["numel"] != here[one]["numel"])
        return self.finding(
            f"the ranks synchronise gradients of different parameters: call {nth + 1} of step {step} has {here[one]['numel']} elements on rank {one} "
            f"and {here[other]['numel']} on rank {other}",
            where=here[one].where,
            ranks=(one, other),
            notes=["a parameter that has no gradient is skipped on the rank that did not use it"],
            help="give every parameter a gradient before the loop: `if p.grad is None: p.grad = torch.zeros_like(p)`",
        )


def _meet(run: Run, step: int) -> bool:
    """Whether the ranks' collectives of a step fit each other one by one: none was skipped, whatever each rank's tensor is."""
    columns = [[(e["op"], e["numel"], e["dtype"]) for e in r.of("coll") if e.step == step and e["world"] is not False] for r in run.present]
    return all(c == columns[0] for c in columns)
