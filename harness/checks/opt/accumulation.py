"""OPT108 accumulation-unscaled: gradients are accumulated and the loss is not divided

What it does
    Counts the backwards from one statement between two zeroings, and looks for a factor at the root of the loss or on the
    gradients.

Why it is bad
    The accumulated gradient is the sum of the micro-batches' means: the step is A times that of the same batch in one piece.

Wrong
    for x, y in micro_batches: criterion(ddp(x), y).backward()
    optimizer.step()

Right
    for x, y in micro_batches: (criterion(ddp(x), y) / len(micro_batches)).backward()
    optimizer.step()

Known limits
    Several backwards from different statements (a GAN, two losses) are not accumulation. A sum loss, or gradients scaled before the step
    otherwise than by an average over the ranks, are silent. Backwards that each take all samples drawn for the step (several losses, tasks or
    views of one batch) are not micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import gradients, own_means, replicas
from harness.model import Finding, Severity
from harness.record import Event, Run, number, where_of


class AccumulationUnscaled(Check):
    code = "OPT108"
    name = "accumulation-unscaled"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        groups = [(rank, e) for rank, e in run.events("accumulation")]
        if not groups:
            raise NotApplicable("no optimizer step after a backward was recorded")
        losses = [e for _, e in run.events("loss")]
        many = [(rank, e, n, site) for rank, e in groups for site, n in e["sites"] or () if isinstance(n, int) and n >= 2]
        if len(many) < 0.8 * len(groups) or len(many) < 2 * len({r for r, _ in groups}):
            raise NotApplicable("gradients are not accumulated over several backwards")
        if all(_of_one_batch(run, rank, e) for rank, e, *_ in many):
            raise NotApplicable("every backward of a step takes all its samples: several losses of one batch")
        where = where_of(many[0][3])
        own = [e for e in losses if e.where and where and (e.where.file, e.where.line) == (where.file, where.line)]
        plain = [e for e in own if own_means.is_plain(run, e, whole=True)]
        if not plain or any(e["scaled"] and e not in plain for e in own):
            return
        if gradients.rescaled(run) and not gradients.averaged(run):
            raise NotApplicable("gradients are rescaled between the backward and the step")
        count = many[0][2]
        yield self.finding(
            f"{count} backwards are accumulated a step and the loss is not divided by {count}: the step is {count} times too large",
            where=where,
            ranks=replicas.rank_list([r for r, *_ in many]),
            notes=[f"operations at the root of the loss: {', '.join(plain[0]['root'] or ())}"],
            help=f"divide the loss by the number of micro-batches: `(loss / {count}).backward()`",
        )


def _of_one_batch(run: Run, rank: int, event: Event) -> bool:
    """Whether the last forward before this step got as many samples as the loader gave for all of the step's backwards."""
    recording = run.ranks[rank]
    index = recording.step_index.get(event.step) if recording is not None else None
    drawn = recording.row(index).num_samples if recording is not None and index is not None else 0
    return 0 < drawn <= number(event["rows"])
