"""DAT124 stride-not-world-size: the ranks take every n-th sample from their rank on, and n is not the number of ranks.

What it does
    Reads, in the code of the data set that is trained on and in the lines that made it, slices `[rank::n]`, `islice(..., rank, None, n)` and conditions
    `i % n == rank`, and compares n, where it is written out or counted from the devices, with the world size.

Why it is bad
    With a smaller n the ranks' shares overlap: they train on the same samples, an epoch is longer than it says. With a larger one a part of the data is
    never seen. No error says so; a machine without GPUs, or another launch, is enough.

Wrong
    self.files = files[rank :: max(1, torch.cuda.device_count())]

Right
    self.files = files[rank :: dist.get_world_size()]

Known limits
    A larger number that is written out is advice: it may be a part of the data, or of a list of seeds, on purpose. The start has to be traced to
    `get_rank()` or RANK, within the script's files; an n that is an argument of the command line is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes, together
from harness.model import Finding, Severity
from harness.record import Run, number, where_of


class StrideNotWorldSize(Check):
    code = "DAT124"
    name = "stride-not-world-size"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        trained = {str(p.opened["dataset"]) for p in passes.training(run)}
        if not trained:
            raise NotApplicable("no training pass over a loader")
        told = [[e["strided"] for e in r.of("dataset") if e["kind"] in trained and isinstance(e["strided"], Mapping)] for r in run.present]
        if not all(told):
            return
        first = told[0][0]
        step, world = number(first["step"]), run.world_size
        if step == world:
            return
        yield self.finding(
            f"{world} ranks part the samples with a stride of {step}, each from its rank on",
            where=where_of(first["site"]),
            ranks=run.rank_ids,
            notes=["their shares overlap: the same samples are drawn by several ranks" if step < world else "a part of the samples is drawn by no rank"],
            severity=Severity.ADVICE if step > world and first["written"] else None,  # every 8th may be all that is wanted
            help="the stride is the number of ranks: `[rank :: dist.get_world_size()]`",
        )
