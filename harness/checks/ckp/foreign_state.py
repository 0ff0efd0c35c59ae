"""CKP121 foreign-state-restored: a scheduler is given the state of something else, and says nothing.

What it does
    Looks at what `load_state_dict` of a learning rate scheduler is given. A finding where that is an optimizer's state, or holds not one of the
    scheduler's own attributes.

Why it is bad
    A scheduler takes any dictionary and makes attributes of its entries. Its own count stays where it was: the schedule starts over, with its
    warm-up, at every resume.

Wrong
    torch.save({"optimizer": optimizer.state_dict(), "scheduler": optimizer.state_dict()}, path)

Right
    torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, path)

Known limits
    Schedulers of torch, and classes derived from them, whose own `load_state_dict` calls torch's.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.ckp import files
from harness.model import Finding, Severity, Where
from harness.record import Run


class ForeignStateRestored(Check):
    code = "CKP121"
    name = "foreign-state-restored"
    severity = Severity.ERROR
    explains = ("CKP107", "CKP113")

    def end(self, run: Run) -> Iterable[Finding]:
        loads = [(rank, e) for rank, e in run.events("load_scheduler")]
        if not loads:
            raise NotApplicable("no scheduler is given a state")
        hit = [(rank, e) for rank, e in loads if e["foreign"]]
        if not hit:
            return
        event = hit[0][1]
        optimizer = "param_groups" in event["foreign"]
        line = f"line {event.where.line}" if event.where is not None else "a line"
        yield self.finding(
            f"{line} gives {event['kind']} {'the state of an optimizer' if optimizer else 'a state that is none of its own'}: the schedule is not "
            "restored",
            where=(_saved_at(run) if optimizer else None) or event.where,
            ranks=sorted({rank for rank, e in hit if e.where == event.where}),
            notes=[f"the entries are {', '.join(f'`{k}`' for k in event['foreign'])}; a scheduler takes any dictionary"],
            help="save `scheduler.state_dict()` under this entry",
        )


def _saved_at(run: Run) -> Where | None:
    """The save that puts an optimizer's state under a scheduler's name."""
    for save in files.saves(run):
        groups = save.begin["groups"] or {}
        if any("sched" in str(k).lower() and role == "optimizer" for k, role in groups.items()):
            return save.begin.where
    return None
