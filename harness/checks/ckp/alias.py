"""CKP109 alias-for-copy: weights that were kept as "the best" are the live ones.

What it does
    Remembers, by weak reference, the tensors that each `state_dict()` gave out. A finding where a dict of an earlier step is loaded or
    saved after more steps, its tensors are still the model's own memory, and the weights have moved in between. So too where live weights
    are handed to another thread that saves them later, or while training goes on; and where a dict is loaded that still is the model's own
    memory although other weights were loaded since it was read out, and where several dicts that one container keeps are all the live weights.

Why it is bad
    `state_dict()` gives references, not copies. What is called the best model is the last one, and nothing says so. A checkpoint that a
    thread writes from live weights is of no step, or of several. A swap for an evaluation that keeps references puts nothing back.

Wrong
    if loss < best:
        best, state = loss, model.state_dict()

Right
    if loss < best:
        best, state = loss, copy.deepcopy(model.state_dict())     # or {k: v.clone() for k, v in ...}

Known limits
    A dict that is read out once before training and then saved again and again means the live weights, and is silent. A second name for
    the model itself (`best = model`) is not seen. Parameters that `copy_()` puts back are looked at from a model's eval() to the next step.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.ckp import files
from harness.model import Finding, Severity, Where
from harness.record import Event, Recording, Run, number, where_of


class AliasForCopy(Check):
    code = "CKP109"
    name = "alias-for-copy"
    severity = Severity.ERROR

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(r.of("state_dict") or r.of("load_state") or r.of("alias_used") or r.of("self_copy") or r.of("kept_live") for r in run.present):
            raise NotApplicable("no model's state is read out or loaded")
        hits: list[tuple[int, Event]] = []
        for rank, recording in enumerate(run.ranks):
            if recording is not None:
                used = [e for e in recording.of("alias_used") if e["changed"]]
                hits.extend((rank, e) for e in used if not _means_live(e, used))
                hits.extend((rank, e) for e in recording.of("self_copy") if e["moved"])
                hits.extend((rank, e) for e in recording.of("kept_live"))
                named = {str(e.where) for e in used}  # the statement that kept the dict is known there
                hits.extend((rank, e) for e in recording.of("load_state") if _no_op(recording, e) and str(e.where) not in named)
        told: set[tuple[str, int]] = set()
        for rank, event in hits:
            where = self._where(event)
            place = (where.file, where.line) if where else ("", 0)
            if place not in told:
                told.add(place)
                yield self._finding(event, where, sorted({r for r, e in hits if self._where(e) == where}) or [rank])

    def _where(self, event: Event) -> Where | None:
        """The statement that kept the dict; the load where that is not known."""
        return where_of(event["kept_at"]) or event.where

    def _finding(self, event: Event, where: Where | None, ranks: list[int]) -> Finding:
        used = event.where
        line = f"line {used.line}" if used else "a later line"
        if event.kind == "self_copy":
            message = f"the weights kept to be put back are the live ones: {line} copies {event['num']} parameters onto themselves"
            notes = ["other weights were put in since; training goes on from those"]
        elif event.kind == "kept_live":
            first, last = event["steps"]
            message = f"the {event['num']} sets of weights kept in `{event['name']}` from steps {first} to {last} are one and the same: the live ones"
            notes = ["state_dict() gives references to the parameters; detach(), and cpu() of what lies there already, copy nothing"]
        elif event["torn"]:
            message = f"the file mixes the weights of steps {event['steps_before']} to {event['steps_now']}: they are stepped while {line} saves them"
            notes = ["the saving thread is given references to the parameters, and training goes on"]
        elif event.kind == "load_state":
            message = "the state that is loaded is the model's own memory: nothing is restored"
            notes = [f"{event['num_self']} of {event['total']} tensors are given back to themselves, after {event.step} steps"]
        else:
            does = "loads" if event["how"] == "load" else f"saves as {files.name(str(event['path'] or '')) or 'a file'}"
            message = (
                f"the weights kept at step {event['steps_before']} are the live ones: {line} {does} those of step {event['steps_now']}"
            )
            notes = ["state_dict() gives references to the parameters, and every step since has changed them"]
        return self.finding(
            message,
            where=where,
            ranks=ranks,
            notes=notes,
            help="keep a copy: `copy.deepcopy(model.state_dict())`, or a `.clone()` of each tensor",
            evidence={"steps_before": event["steps_before"], "steps_now": event["steps_now"]},
        )


def _means_live(event: Event, used: list[Event]) -> bool:
    """Saved, or given to another model, at several steps, or read out before the first: the script wants what the weights are now."""
    if event["how"] == "load" and event["same_module"]:
        return False  # giving a model its own memory is never meant
    if number(event["steps_before"]) == 0:
        return True
    return len({number(e["steps_now"]) for e in used if e["token"] == event["token"]}) > 1


def _no_op(recording: Recording, event: Event) -> bool:
    """Every tensor is the module's own, by a dict that was not made in this step, by a line whose dicts are kept over the steps, or although
    other weights were loaded since the dict was made."""
    total = number(event["total"])
    if total == 0 or number(event["num_self"]) < total or event.step == 0 or event["error"]:
        return False
    kept = where_of(event["kept_at"])
    held = kept is not None and kept != event.where and any(e.where == kept for e in recording.of("state_held"))
    return held or not event["fresh"] or bool(event["replaced"])
