"""CKP107 resume-incomplete: a checkpoint holds more than was restored from it, and training goes on.

What it does
    Compares what a loaded checkpoint holds (model, optimizer, scheduler, scaler) with what was put back before the next step. Also: a file of
    the script's own that holds the model and a count of epochs or steps, from which training counts on, but no state of the optimizer. And
    `torch.distributed.checkpoint.load` into an optimizer that has no state yet: it reads what it is given tensors for, so it reads none of it.

Why it is bad
    Adam starts without moments, the schedule from its warm-up, the scaler from its first guess. The loss jumps at every resume and
    training is another one than without the interruption.

Wrong
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])

    torch.save({"model": model.state_dict(), "epoch": epoch}, path)      # where is Adam?

    dcp.load({"optimizer": AdamW(model.parameters())}, checkpoint_id=path)   # has no moments to read into

Right
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    first_epoch = checkpoint["epoch"] + 1

    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}        # makes them first
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])

Known limits
    Fine-tuning starts from a checkpoint with a new optimizer on purpose. Where nothing but the model is restored, this is silent unless
    all of the model was in the file and the script writes files of the same layout; it is advice unless it writes that very file. A file
    without an optimizer is advice where epochs count from 0 (a warm start), and silent where the optimizer has no state. Epochs that count
    from 0 again are DAT112's. Of torch.distributed.checkpoint only optimizers that were asked for are judged, by the default planner and by
    those built on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks.base import Check, NotApplicable
from harness.checks.ckp import files, goes_on
from harness.model import Finding, Severity, Where
from harness.probe import protocol
from harness.record import Event, Recording, Run, number, texts

RESTORES = {"optimizer": "load_optimizer", "scheduler": "load_scheduler", "scaler": "load_scaler"}


class ResumeIncomplete(Check):
    code = "CKP107"
    name = "resume-incomplete"
    severity = Severity.WARNING
    explains = ("CKP113",)

    def end(self, run: Run) -> Iterable[Finding]:
        loads = [load for load in files.loads(run) if load.ok]
        unfilled = list(run.events("unfilled_optimizer"))
        if not loads and not unfilled:
            raise NotApplicable("nothing is loaded with torch.load")
        yield from self._unfilled(unfilled)
        told: set[tuple[str, int]] = set()
        applied = False
        for load in loads:
            recording = run.ranks[load.rank]
            if recording is None or load.end is None or files.steps_after(recording, load.begin) == 0 or not _restored(recording, load):
                continue
            applied = True
            where = load.begin.where
            place = (where.file, where.line) if where else ("", 0)
            lost, kept = self._lost(run, recording, load)
            if place not in told and not lost and (left_out := self._left_out(run, recording, load)) is not None:
                told.add(place)
                yield left_out
            elif place not in told and not lost and _bare(run, recording, load):
                told.add(place)
                yield self._advice(load, recording)
            elif place not in told and lost:
                told.add(place)
                yield self._finding(run, load, recording, lost, kept, sorted({o.rank for o in loads if o.begin.where == where}))
        if not applied and not unfilled:
            raise NotApplicable("no training continues from a checkpoint")

    def _unfilled(self, told: Sequence[tuple[int, Event]]) -> Iterable[Finding]:
        """An optimizer that had no state where torch.distributed.checkpoint was to read it, and still none at its next step."""
        for (where, entry), event in {(e.where, str(e["entry"])): e for _, e in reversed(told)}.items():
            yield self.finding(
                f"the {event['kind']} that is to be loaded from {files.name(str(event['path'] or '')) or 'a checkpoint'} has no state yet, so "
                f"torch.distributed.checkpoint reads none of its state into it: training goes on with a new {event['kind']}",
                where=where,
                ranks=sorted({rank for rank, e in told if (e.where, e["entry"]) == (where, entry)}),
                notes=[
                    f"under `{entry}.state` the checkpoint holds {event['held']} tensors ({', '.join(texts(event['moments']))}); the state dict "
                    "of an optimizer that has not stepped is empty",
                ],
                help="hand it `get_optimizer_state_dict(model, optimizer)`, which makes the moments first, and give the optimizer what was read: "
                "`set_optimizer_state_dict(model, optimizer, state[...])` (torch.distributed.checkpoint.state_dict)",
            )

    def _left_out(self, run: Run, recording: Recording, load: files.Load) -> Finding | None:
        """Training counts on from the file's number, with an optimizer whose moments are in no file."""
        if not (_own_layout(run, load) and _whole(recording, load) and goes_on.optimizer_left_out(run, load)):
            return None
        made, counted = goes_on.begins_anew(recording, load), goes_on.counted_on(run, recording, load)
        if made is None or not counted or load.end is None:
            return None
        save = next((s.begin.where for s in files.saves(run) if set(s.begin["groups"] or ()) == set(load.groups)), None)
        line = f"line {load.begin.where.line}" if load.begin.where is not None else "a load"
        return self.finding(
            f"{files.name(load.path) or 'the checkpoint'} holds no state of the optimizer: training goes on from its `{counted}` "
            f"{load.end['numbers'][counted]} with a new {made['kind']}",
            where=save or load.begin.where,
            ranks=sorted({o.rank for o in files.loads(run) if o.begin.where == load.begin.where}),
            notes=[
                f"the checkpoint holds {', '.join(f'`{k}`' for k in load.groups)}",
                f"{line} resumes from it; {files.steps_after(recording, load.begin)} steps follow",
            ],
            help="save `optimizer.state_dict()` (and the scheduler's) beside the model, and restore it",
        )

    def _advice(self, load: files.Load, recording: Recording) -> Finding:
        return self.finding(
            f"training goes on from {files.name(load.path)}, which holds the model only: the optimizer starts over",
            where=load.begin.where,
            ranks=(load.rank,),
            notes=[f"{files.steps_after(recording, load.begin)} steps follow, with a fresh optimizer of the same kind"],
            help="save `optimizer.state_dict()` (and the scheduler's) beside the model, and restore it",
            severity=Severity.ADVICE,
        )

    def _lost(self, run: Run, recording: Recording, load: files.Load) -> tuple[list[str], list[str]]:
        """(parts of the checkpoint that nobody restored although this training needs them, parts that were restored beside the model)."""
        groups = load.groups
        held = [(entry, role) for entry, role in groups.items() if role in RESTORES]
        missing = [(entry, role) for entry, role in held if not _given_back(run, recording, load, RESTORES[role])]
        kept = [pair[1] for pair in held if pair not in missing]
        if not missing or not (len(kept) > 0 or (_own_layout(run, load) and _whole(recording, load))):
            return [], []
        return [entry for entry, role in missing if _used(recording, load, role)], kept

    def _finding(self, run: Run, load: files.Load, recording: Recording, lost: list[str], kept: list[str], ranks: list[int]) -> Finding:
        parts = ", ".join(f"`{entry}`" for entry in lost)
        numbers = load.end["numbers"] if load.end is not None else None
        epoch = [f"it is of {k} {v}" for k, v in (numbers or {}).items() if k in ("epoch", "step", "global_step", "iteration")]
        return self.finding(
            f"training goes on from {files.name(load.path) or 'a checkpoint'} without its {parts}",
            where=_site(recording, load) or load.begin.where,
            ranks=ranks,
            notes=[
                f"the checkpoint holds {', '.join(f'`{k}`' for k in load.groups)}",
                *epoch,
                f"{files.steps_after(recording, load.begin)} steps follow",
            ],
            severity=None if kept or _own_file(run, load) else Severity.ADVICE,
            help="restore it as well: " + "; ".join(f"`{load.groups[e]}.load_state_dict(checkpoint[{e!r}])`" for e in lost),
            evidence={"lost": lost},
        )


def _next(recording: Recording, load: files.Load) -> int:
    """Time of the next load of a file, the end of what this one can have given."""
    assert load.end is not None
    end_ns = load.end.t_ns
    return min((e.t_ns for e in recording.of("load") if not e["done"] and e.t_ns > end_ns), default=1 << 62)


def _between(recording: Recording, load: files.Load, kind: str) -> list[Event]:
    """Events of a kind after the load, before the next load and before three steps are taken."""
    assert load.end is not None
    begin, end = load.end.t_ns, _next(recording, load)
    return [e for e in recording.of(kind) if begin <= e.t_ns <= end and e.step <= number(load.end.step)]


def _restored(recording: Recording, load: files.Load) -> bool:
    """The model was given this file's tensors, most of them."""
    found = [e for e in _between(recording, load, "load_state") if not e["error"] and e["source"] in ("", load.path)]
    return any(2 * number(e["matched"]) > number(e["total"]) for e in found)


def _site(recording: Recording, load: files.Load) -> Where | None:
    found = [e for e in _between(recording, load, "load_state") if not e["error"]]
    return found[0].where if found else None


def _given_back(run: Run, recording: Recording, load: files.Load, kind: str) -> bool:
    """Restored on this rank, or on another and sent here (CKP106 judges that)."""
    if _between(recording, load, kind):
        return True
    if kind == "load_scheduler" and any((e["last_epoch"] or 0) > 0 for e in recording.of("scheduler_made")):
        return True
    return any(e.step >= number(load.begin.step) for other in run.present if other is not recording for e in other.of(kind))


def _whole(recording: Recording, load: files.Load) -> bool:
    """The model took everything: no new head."""
    return any(not e["num_missing"] and not e["num_unexpected"] for e in _between(recording, load, "load_state") if not e["error"])


def _bare(run: Run, recording: Recording, load: files.Load) -> bool:
    """A file of this run's own without an optimizer, and an optimizer with momentum that begins anew."""
    own = _own_file(run, load) and _whole(recording, load) and set(load.groups.values()) <= {"tensor", "model", "number"}
    keeps = own and not _other_shapes(recording, load) and any(goes_on.keeps_moments(e) for e in recording.of("params"))
    elsewhere = any(e.step == load.begin.step for e in recording.of("load_optimizer"))  # its state lies in a file of its own
    return keeps and not elsewhere and _used(recording, load, "optimizer") and number(load.begin.step) > 0


def _other_shapes(recording: Recording, load: files.Load) -> bool:
    """The model that trains from here on has a tensor of the file's name in another shape: a new head, a transfer to another task."""
    assert load.end is not None
    inside = {protocol.clean_name(str(n).rsplit("/", 1)[-1]): s for n, s in zip(load.end["tensors"] or (), load.end["shapes"] or (), strict=False)}
    made = [e for e in recording.of("params") if e.t_ns > load.end.t_ns]
    pairs = ((inside.get(protocol.clean_name(str(n))), s) for e in made for n, s in zip(e["names"] or (), e["shapes"] or (), strict=False))
    return any(stored is not None and list(stored) != list(own) for stored, own in pairs)


def _own_file(run: Run, load: files.Load) -> bool:
    """The run writes this very file."""
    return load.path != "" and any(save.path == load.path for save in files.saves(run))


def _own_layout(run: Run, load: files.Load) -> bool:
    """The run writes this file, or files with the same entries: it is the script's own checkpoint."""
    keys = set(load.groups)
    found = [set(e["groups"]) for r in run.present for e in r.of("save") if isinstance(e["groups"], dict)]
    return _own_file(run, load) or keys in found


def _used(recording: Recording, load: files.Load, role: str) -> bool:
    """Whether the training that follows has such a thing, and a fresh one: an optimizer that was stepped before keeps its state."""
    step = number(load.begin.step)
    rows = [row for row in recording.all_rows() if row.step >= step]
    if role == "scaler":
        return any(row.scale > 0 for row in rows)
    if role == "scheduler":
        return bool(rows) and rows[-1].sched > rows[0].sched and rows[0].sched <= _scheduled(recording, step)
    old = {row.opt for row in recording.all_rows() if row.step < step}
    fresh = {row.opt for row in rows if row.opt not in old and row.opt != protocol.OPT_BY_HAND}
    known = {_likeness(e) for e in recording.of("params") if e["opt"] in old}
    return any(e["opt"] in fresh and (not known or _likeness(e) in known) for e in recording.of("params"))


def _likeness(event: Event) -> tuple[str, int]:
    """Kind of an optimizer and number of its parameters: a second stage has another one on purpose."""
    return str(event["kind"]), len(event["names"] or ())


def _scheduled(recording: Recording, step: int) -> int:
    """Scheduler steps before the load, and the one that construction makes; more means that the script wound a new one forward."""
    return max((row.sched for row in recording.all_rows() if row.step < step), default=0) + 1
