"""OUT105 prints-local-loss: the loss that one rank prints is that of its own shard.

What it does
    Compares the numbers in lines that only one rank prints with that rank's loss at the step, where the losses of the ranks differ.

Why it is bad
    It reads like the loss of the job and is noisier than it by the square root of the number of ranks. Harmless while it is known; wrong
    as soon as it picks a model or is compared with a run on another number of ranks.

Wrong
    if rank == 0:
        print(f"loss {loss.item():.4f}")

Right
    dist.all_reduce(loss_sum)                            # on every rank
    if rank == 0:
        print(f"loss {loss_sum.item() / world_size:.4f}")

Known limits
    Advice. Averages that the script computes itself over a shard are not recognised here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.out import lines
from harness.model import Finding, Severity
from harness.record import Event, Run


class PrintsLocalLoss(Check):
    code = "OUT105"
    name = "prints-local-loss"
    severity = Severity.ADVICE
    substantial = False  # a script that trains nothing prints and has threads too

    def end(self, run: Run) -> Iterable[Finding]:
        if len(run.present) < 2:
            raise NotApplicable("one rank")
        by_site: dict[tuple[str, int], list[tuple[int, Event]]] = {}
        for kind in ("print", "log"):
            for rank, event in run.events(kind):
                where = event.where
                if where is not None:
                    by_site.setdefault((where.file, where.line), []).append((rank, event))
        if not by_site:
            raise NotApplicable("nothing is printed")
        for group in by_site.values():
            ranks = {rank for rank, _ in group}
            hits = [(rank, event, near) for rank, event in group if len(ranks) == 1 and (near := _local(run, rank, event)) is not None]
            if len(hits) > 1 or (hits and len(group) == 1):
                rank, event, (mine, others) = hits[0]
                yield self.finding(
                    f"rank {rank} prints the loss of its own shard",
                    where=event.where,
                    ranks=(rank,),
                    notes=[f"step {event.step - 1}: {mine:.4f} here, {', '.join(f'{v:.4f}' for v in others[:3])} on the other ranks"],
                    help="reduce the loss over all ranks before printing, or say in the line that it is one rank's",
                    evidence={"lines": len(hits)},
                )
                return


def _local(run: Run, rank: int, event: Event) -> tuple[float, list[float]] | None:
    """(this rank's loss, the others') where the line shows the first and not the mean of all."""
    shown = lines.decimals(str(event["text"] or ""))
    for step in (event.step - 1, event.step):
        losses = _losses(run, step)
        mine = losses.pop(rank, math.nan)
        if not losses or not math.isfinite(mine):
            continue
        mean = (mine + sum(losses.values())) / (1 + len(losses))
        for value, half in shown:
            if abs(value - mine) <= half * 1.01 and abs(mean - mine) > 4 * half:
                return mine, list(losses.values())
    return None


def _losses(run: Run, step: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for rank, recording in enumerate(run.ranks):
        index = recording.step_index.get(step) if recording is not None else None
        if recording is not None and index is not None:
            loss = recording.row(index).loss
            if math.isfinite(loss):
                found[rank] = loss
    return found
