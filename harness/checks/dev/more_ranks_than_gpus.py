"""DEV108 more-ranks-than-gpus: a host runs more ranks than it has GPUs, so some share one.

What it does
    Counts the ranks that use a GPU and the different GPUs of their host. A warning.

Why it is bad
    Two ranks on one GPU take turns: no faster than one, with twice the memory. NCCL refuses it ("Duplicate GPU detected").

Wrong
    torchrun --nproc-per-node 4 train.py        # two GPUs

Right
    torchrun --nproc-per-node gpu train.py      # one rank a GPU

Known limits
    For tests on a small machine it may be meant; silence it there.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.dev import tables
from harness.model import Finding, Severity
from harness.record import Run


class MoreRanksThanGpus(Check):
    code = "DEV108"
    name = "more-ranks-than-gpus"
    severity = Severity.WARNING
    explains = ("PRF102", "PRF107")

    def end(self, run: Run) -> Iterable[Finding]:
        for group in tables.by_host(tables.used(run)):
            gpus = tables.num_gpus(group)
            if len(group) > gpus:
                call = tables.chosen_at(group[-1])
                yield self.finding(
                    f"{len(group)} ranks share {gpus} GPU{'s' if gpus > 1 else ''} on one host",
                    where=call.where if call is not None else None,
                    ranks=[one.rank for one in group],
                    notes=tables.note(group),
                    help=f"start {gpus} rank{'s' if gpus > 1 else ''} on this host (--nproc-per-node {gpus})",
                )
                return
