"""OUT105 prints-local-loss: the loss that one rank prints is that of its own shard.

What it does
    Compares the numbers in lines that only one rank prints with that rank's loss at the step, where the losses of the ranks differ. A number counts
    that is the loss in nearly all such lines: in one of many it is so by chance.

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
    Advice. Averages that the script computes itself over a shard are not recognised here. A line that shows every rank's loss, or says whose it
    is ("rank 0", "local loss"), is healthy.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from harness.checks.base import Check, NotApplicable
from harness.checks.out import lines
from harness.model import Finding, Severity
from harness.probe import protocol
from harness.record import Event, Recording, Run

OWN = re.compile(r"(?<![a-z])((rank|shard|worker)\W{0,2}\d|(local|rank|shard|worker)\W{0,2}(\w+\W)?loss)", re.IGNORECASE)  # "rank 0", "local loss"
USUAL = 0.8  # of the lines that can tell
Hit = tuple[int, Event, tuple[float, list[float]]]  # rank, line, its loss and the others'


class Step(NamedTuple):
    mine: float
    others: list[float]
    alone: bool  # one backward: of several, a line may show another than the last

    @property
    def mean(self) -> float:
        return (self.mine + sum(self.others)) / (1 + len(self.others))


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
            hits = _hits(run, group) if len({rank for rank, _ in group}) == 1 else []
            if len({id(event) for _, event, _ in hits}) > 1 or (hits and len(group) == 1):
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


def _hits(run: Run, group: list[tuple[int, Event]]) -> list[Hit]:
    """Lines with the loss at a place where nearly all lines of the kind have it that can tell."""
    hits: dict[tuple[str, int], list[Hit]] = {}
    others: Counter[tuple[str, int]] = Counter()
    for rank, event in group:
        text = str(event["text"] or "")
        if OWN.search(text):
            continue
        shown = lines.decimals(text)
        known = [step for at in (event.step - 1, event.step) if (step := _step(run, rank, at)) is not None] if shown else []
        form = " ".join(lines.mask(text).split())
        for place, (value, half) in enumerate(shown):
            near = [step for step in known if abs(value - step.mine) <= half * 1.01]
            told = next((step for step in near if abs(step.mean - step.mine) > 4 * half and not _all_shown(shown, step.others)), None)
            if told is not None:
                hits.setdefault((form, place), []).append((rank, event, (told.mine, told.others)))
            others[form, place] += not near and any(step.alone for step in known)
    usual = [found for key, found in hits.items() if len(found) >= USUAL * (len(found) + others[key])]
    return sorted((hit for found in usual for hit in found), key=lambda hit: hit[1].t_ns)


def _all_shown(shown: list[tuple[float, float]], others: list[float]) -> bool:
    """Whether the line shows the other ranks' losses as well: they were gathered."""
    return all(any(abs(value - loss) <= half * 1.01 for value, half in shown) for loss in others)


def _step(run: Run, rank: int, step: int) -> Step | None:
    recording = run.ranks[rank]
    mine = _number(recording, step, "loss")
    others = [v for r, other in enumerate(run.ranks) if r != rank and math.isfinite(v := _number(other, step, "loss"))] if math.isfinite(mine) else []
    return Step(mine, others, _number(recording, step, "num_backward") <= 1) if others else None


def _number(recording: Recording | None, step: int, name: str) -> float:
    index = recording.step_index.get(step) if recording is not None else None
    if recording is None or index is None:
        return math.nan
    offset, number = protocol.NUMBER_OFFSET[name]
    return float(number.unpack_from(recording.rows, index * protocol.ROW.size + offset)[0])
