"""PRF115 weights-sent-again: parameters that DDP keeps equal are broadcast or averaged once more in every step.

What it does
    Looks at broadcasts and all-reduces whose tensor is a parameter of a DDP model: a finding where one statement sends parameters between all
    steps, and the ranks' parameters were equal at every step already. A warning where that takes a tenth of the step, else advice.

Why it is bad
    DDP sends rank 0's parameters once, when it wraps the model, and averages the gradients since: equal parameters take equal steps. What is sent
    again is what the others have, and each parameter costs a message of its own.

Wrong
    optimizer.step()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)

Right
    optimizer.step()                     # equal parameters, equal gradients: equal parameters

Known limits
    Silent where a step's parameters differed between ranks, whatever the reason: the broadcast does something there. So it is where it comes at
    some steps only (a safeguard once an epoch), and for models that DDP does not wrap.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from harness.checks.base import Check, Inconclusive
from harness.checks.syn import replicas
from harness.model import Finding, Severity, Where
from harness.record import Event, Recording, Run

MIN_STEPS, DEAR = 8, 0.1


@dataclass(frozen=True)
class Sent:
    """What one statement sends of the parameters in every step, and the share of the step that it takes."""

    where: Where
    op: str
    num: int
    share: float
    ms: float


class WeightsSentAgain(Check):
    code = "PRF115"
    name = "weights-sent-again"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run, ddp=True)
        sent = [one for r in run.present if (one := _sent(r)) is not None]
        if not sent and max(r.num_rows for r in run.present) < MIN_STEPS:
            raise Inconclusive(f"fewer than {MIN_STEPS} steps")
        if not sent or len(sent) < len(run.present) or any(p.num_param for p in facts.partings.values()) or not _equal_before(run):
            return
        dearest = max(sent, key=lambda s: s.share)
        verb = "broadcast" if dearest.op == "broadcast" else "averaged"
        yield self.finding(
            f"{dearest.num} parameters that DDP keeps equal are {verb} again in every step: {dearest.share:.0%} of its time",
            where=dearest.where,
            ranks=run.rank_ids,
            severity=None if dearest.share >= DEAR else Severity.ADVICE,
            notes=[f"{dearest.ms:.1f} ms a step; the ranks' parameters were equal at every step before they were sent"],
            help="leave it out: DDP broadcasts them when it wraps the model, and equal gradients keep them equal",
        )


def _equal_before(run: Run) -> bool:
    """Whether what was sent was bit by bit the same on all ranks, each time: an edit behind the step is what a broadcast may carry."""
    columns = [[(e.where, e["replicated"]) for e in r.of("coll") if e["replicated"]] for r in run.present]
    return all(len(set(told)) == 1 for told in zip(*columns, strict=False))


def _sent(recording: Recording) -> Sent | None:
    by_place: dict[tuple[str, int], dict[int, list[Event]]] = {}
    for event in recording.of("coll"):
        if event["replicated"] and event.where is not None and event.step:
            by_place.setdefault((event.where.file, event.where.line), {}).setdefault(event.step, []).append(event)
    found = [one for steps in by_place.values() if (one := _of_statement(recording, steps)) is not None]
    return max(found, key=lambda s: s.share, default=None)


def _of_statement(recording: Recording, steps: dict[int, list[Event]]) -> Sent | None:
    """None unless it comes in every step of those in which collectives are told."""
    whole = [s for s in sorted(steps) if s in recording.step_index]
    if len(whole) < MIN_STEPS or whole != list(range(whole[0], whole[-1] + 1)):
        return None
    first = steps[whole[0]][0]
    num = int(statistics.median(len(steps[s]) for s in whole))
    rows = [recording.row(recording.step_index[s]) for s in whole]
    each_s = statistics.median(r.coll_s / max(1, r.num_coll) for r in rows)
    step_s = statistics.median(r.wall_s for r in rows)
    if first.where is None or step_s <= 0:
        return None
    return Sent(first.where, str(first["op"]), num, min(1.0, num * each_s / step_s), 1e3 * num * each_s)
