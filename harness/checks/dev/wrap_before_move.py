"""DEV105 wrap-before-move: the optimizer was built, or the model wrapped, before the model was moved or materialised.

What it does
    A later `.to(...)`, `.cuda()` or `.to_empty(...)` replaced parameters that a living optimizer holds, or moved a wrapped module to
    another device. An error.

Why it is bad
    The optimizer goes on with the old parameters (those on the meta device, for instance), which no forward uses: the loss stays flat. A
    wrapped module's hooks sit on gradient accumulators that no longer exist: replicas drift apart. Nothing is said in either case.

Wrong
    optimizer = AdamW(model.parameters())
    model.to_empty(device=device)

Right
    model.to_empty(device=device)
    optimizer = AdamW(model.parameters())

Known limits
    `.to(device)` keeps Parameter objects in current torch and is healthy after an optimizer was built, as long as nothing was stepped
    before.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Event, Run


class WrapBeforeMove(Check):
    code = "DEV105"
    name = "wrap-before-move"
    severity = Severity.ERROR
    explains = ("OPT101", "SYN103", "OPT113", "SYN126", "SYN127", "SYN102", "LAU101", "HNG*", "EVL106")

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(r.num_rows or r.of("moved_late") for r in run.processes):
            raise NotApplicable("nothing was trained")
        late = [(rank, e) for rank, e in run.events("moved_late") if _harms(e)]
        if not late:
            return
        event = late[0][1]
        held = "an optimizer" if event["held_by"] == "optimizer" else "DistributedDataParallel"
        if event["replaced"]:
            message = f"{event['replaced']} parameters that {held} holds were replaced by a later move of {event['module']}"
        else:
            message = f"{event['module']} was moved from {_list(event['from_devices'])} to {_list(event['to_devices'])} "
            f"after {held} took its parameters"
        yield self.finding(
            message,
            where=event.where,
            ranks=sorted({rank for rank, _ in late}),
            notes=[f"{event['held']} parameters are held, from {_list(event['from_devices'])} to {_list(event['to_devices'])}"],
            help="move the model first; build the optimizer and wrap the model afterwards",
        )


def _list(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "unknown"


def _harms(event: Event) -> bool:
    """Replaced parameters always; a change of device where DDP's hooks or the state of a stepped optimizer stay behind."""
    if event["replaced"]:
        return True
    return bool(event["changed"]) and (event["held_by"] == "ddp" or bool(event["stepped"]))
