"""MEM107 process-groups-pile-up: one statement makes a process group of the same ranks again and again, and none is destroyed.

What it does
    Follows `dist.new_group()` after the first optimizer step. Four and more groups of one statement and the same ranks that exist at the same
    time, made in four different steps, are a warning at that statement.

Why it is bad
    Each group has sockets, threads and buffers of its own (NCCL: communicators with memory on the GPU) that stay until
    `destroy_process_group(group)`. After hours the process has no file descriptors or no memory left; and each one costs a rendezvous of all
    ranks.

Wrong
    def evaluate(model):
        group = dist.new_group()
        dist.all_reduce(counts, group=group)

Right
    group = dist.new_group()          # once, before the training

    def evaluate(model, group):
        dist.all_reduce(counts, group=group)

Known limits
    Groups of different ranks (one a stage, one a bucket) are not counted together.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Run, number

MIN_STEPS = 4


class GroupsPileUp(Check):
    code = "MEM107"
    name = "process-groups-pile-up"
    severity = Severity.WARNING
    explains = ("MEM103", "MEM104")

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(run.events("pg")):
            raise NotApplicable("no process group")
        found = [(rank, e) for rank, e in run.events("groups") if number(e["steps"]) >= MIN_STEPS and e.where is not None]
        if not found:
            return
        _, worst = max(found, key=lambda one: number(one[1]["num"]))
        yield self.finding(
            f"{worst['num']} process groups of the same {worst['size']} ranks exist that this statement has made: none is destroyed",
            where=worst.where,
            ranks=sorted({rank for rank, e in found if e.where == worst.where}),
            notes=[f"made in {worst['steps']} different steps of the training"],
            help="make the group once, before the training, and hand it on; or `dist.destroy_process_group(group)` after its use",
        )
