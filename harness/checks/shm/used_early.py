"""SHM110 model-used-before-join: the parent evaluates or saves the shared model while its workers still train it, and never after.

What it does
    Looks at what the parent does with a shared model between the start of its workers and the last `join()`: a forward without gradients, a
    state dict that is saved. A finding where the model changed afterwards and the parent has not looked at it again.

Why it is bad
    `start()` returns at once. The accuracy that is printed and the weights that are saved are those of a model that has hardly been trained.

Wrong
    for p in processes:
        p.start()
    test(model)
    torch.save(model.state_dict(), path)
    for p in processes:
        p.join()

Right
    for p in processes:
        p.join()
    test(model)
    torch.save(model.state_dict(), path)

Known limits
    Silent where the parent does so again and again (it watches the training), where it trains too, and where the workers save or evaluate
    the model themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.shm.workers import Team, teams
from harness.model import Finding, Severity
from harness.record import Event, Run, number

MAX_TIMES = 2  # a parent that watches the training looks more often


class ModelUsedBeforeJoin(Check):
    code = "SHM110"
    name = "model-used-before-join"
    severity = Severity.ERROR

    def end(self, run: Run) -> Iterable[Finding]:
        found = [team for team in teams(run) if any(w.steps_shared for w in team.workers)]
        if not found:
            raise NotApplicable("no processes train a shared model")
        for team in found:
            early = _early(team)
            if early:
                yield self._found(team, early)

    def _found(self, team: Team, early: list[Event]) -> Finding:
        saved = _saves(team)
        what = "evaluates" if any(e["how"] == "forward" for e in early) else "saves"
        lines = sorted({e.where.line for e in (*early, *saved) if e.where is not None})
        return self.finding(
            f"the parent {what} the shared model while its {len(team.workers)} workers still train it, and never after they have ended",
            where=early[0].where,
            ranks=(team.rank,),
            notes=[
                "the model has changed since: what was measured or saved is not what was trained",
                *([f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))} ran before the last join()"] if lines else []),
            ],
            help="wait for all workers (`p.join()`) before the model is evaluated and saved",
        )


def _early(team: Team) -> list[Event]:
    """The parent's uses of a model that its workers trained, each followed by a change and by no later use of the model."""
    if team.took_results() or not all(w.ended_well and not (w.joined and w.joined["left"]) for w in team.workers):
        return []
    if any(w.recording is not None and (w.recording.of("save") or w.recording.of("evaluated")) for w in team.workers):
        return []
    told, saved = team.parent.of("model_early"), bool(_saves(team))
    models = {number(e["id"]) for e in told if e["since"]}
    used = {number(e["id"]) for e in team.parent.of("model_used")}
    forwards = [e for e in told if e["how"] == "forward" and not (e["grad"] and e["training"])]
    watched = any(number(e["num"]) > MAX_TIMES for e in forwards)
    found = [e for e in told if (e["how"] == "forward" and e in forwards) or (e["how"] == "state_dict" and saved)]
    return [] if watched else sorted((e for e in found if number(e["id"]) in models - used), key=lambda e: e["how"] != "forward")


def _saves(team: Team) -> list[Event]:
    """Files that the parent saved while a worker ran; none where it has saved one after that."""
    last = max((w.joined.t_ns for w in team.workers if w.joined is not None), default=0)
    saves = [e for e in team.parent.of("save") if e["done"] and e.t_ns >= team.began_ns]
    return [] if any(e.t_ns > last for e in saves) else saves
