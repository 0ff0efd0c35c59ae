"""OPT139 updates-rounded-away: the parameters are kept in half precision, and most steps leave them as they were

What it does
    For optimizers whose parameters are bfloat16 or float16 themselves: looks at sampled elements that have a gradient, before and after a step, at one
    step in 4. A finding where half of them and more come out bit by bit as they were, at learning rates of at least half the highest; advice from a
    quarter on.

Why it is bad
    bfloat16 has 8 bits: beside 1.0 the next number is 0.992 or 1.008. A step of 1e-4 is rounded to nothing, at every step again, and no error says
    so: layer norms never move, large weights do not either, and the loss falls more slowly than in float32.

Wrong
    model = Net().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

Right
    model = Net()                                          # float32 weights and optimizer state
    with torch.autocast(device_type, dtype=torch.bfloat16):
        loss = criterion(model(x), y)

Known limits
    Only parameters on the CPU, torch's own optimizers, and four looks at least: another optimizer may keep the rest of each step (float32 master weights,
    Kahan summation) or round at random. Silent where nine tenths of the elements have moved since the first look, and for parameters of which many stand at
    the ends of an interval that the script clamps them to.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Event, Run, number, where_of

MIN_LOOKS, MOST, MANY, STILL = 4, 0.5, 0.25, 0.1


class UpdatesRoundedAway(Check):
    code = "OPT139"
    name = "updates-rounded-away"
    severity = Severity.WARNING
    explains = ("OPT113",)

    def end(self, run: Run) -> Iterable[Finding]:
        if not any("cpu" in (e["devices"] or ()) for _, e in run.events("params")):
            raise NotApplicable("no optimizer steps parameters on the CPU")
        told = list(run.events("rounded_away"))
        found = [(share, rank, e) for rank, e in told if (share := _share(e)) is not None and share >= MANY and _still(e) >= STILL]
        if not found:
            return
        share, _, event = max(found, key=lambda f: f[0])
        stuck = [str(n) for n in event["stuck"] or ()]
        yield self.finding(
            f"the parameters are {event['dtype']} themselves: {share:.0%} of their elements that have a gradient are as they were after a step, which is "
            "smaller than the distance to the next number",
            where=where_of(event["cast"]) or event.where,
            ranks=sorted({rank for _, rank, _ in found}),
            severity=None if share >= MOST else Severity.ADVICE,
            notes=[
                f"{_still(event):.0%} of them have not moved at all since the first look",
                *([f"of {number(event['num_params'])} parameters {number(event['num_stuck'])} stand still whole, as {', '.join(stuck[:3])}"] if stuck else []),
            ],
            help="keep the parameters in float32 and compute in half precision: `with torch.autocast(..., dtype=torch.bfloat16)` around the forward",
        )


def _share(event: Event) -> float | None:
    """Lost elements among those looked at, where the learning rate of their group was at least half of its highest; None after too few looks."""
    looks: list[Any] = [x for x in event["looks"] or () if isinstance(x, list) and len(x) == 4]
    highest: dict[Any, float] = {}
    for group, lr, _, _ in looks:
        highest[group] = max(highest.get(group, 0.0), lr)
    counted = [(lost, num) for group, lr, lost, num in looks if lr >= 0.5 * highest[group] > 0]
    num = sum(n for _, n in counted)
    return sum(lost for lost, _ in counted) / num if len(counted) >= MIN_LOOKS and num else None


def _still(event: Event) -> float:
    """Elements that were at the last look as at the first."""
    told = event["still"]
    return number(told[0]) / number(told[1]) if isinstance(told, list) and len(told) == 2 and number(told[1]) else 0.0
