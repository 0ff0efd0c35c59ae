"""SHM109 workers-one-by-one: processes that train one shared model are started and waited for one after the other.

What it does
    Looks at the processes that one statement starts and that all step one model in shared memory: whether each had been joined before the
    next was started.

Why it is bad
    The workers never train at the same time. The result is right, the time is that of one process, and the start of each comes on top.

Wrong
    for worker in range(num_workers):
        p = mp.Process(target=train, args=(worker, model))
        p.start()
        p.join()

Right
    for p in processes:
        p.start()
    for p in processes:
        p.join()

Known limits
    Silent for processes that train a model of their own each (cross-validation), and where the parent looks at the model between two of them.
    Advice where the loop counts epochs, phases or the like: a new process for each gives all its memory back.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.shm.workers import Team, Worker, teams
from harness.model import Finding, Severity
from harness.record import Run, where_of

_IN_TURN = re.compile(r"epoch|phase|stage|round|task|step|chunk|curriculum|generation|\bpart", re.IGNORECASE)


class WorkersOneByOne(Check):
    code = "SHM109"
    name = "workers-one-by-one"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        groups = [(team, group) for team in teams(run) for group in _together(team)]
        if not groups:
            raise NotApplicable("no two processes of one statement step one shared model")
        for team, group in groups:
            if all(_joined_ns(a) <= b.started.t_ns for a, b in itertools.pairwise(group)) and not _looked_between(team, group):
                yield self._found(team, group)

    def _found(self, team: Team, group: list[Worker]) -> Finding:
        first, last = group[0], group[-1]
        took_s = (_joined_ns(last) - first.started.t_ns) / 1e9
        header = str(first.started["loop"] or "")
        return self.finding(
            f"{len(group)} workers train one shared model one after the other: each is waited for before the next is started",
            where=(where_of(first.joined["at"]) if first.joined is not None else None) or first.where,
            ranks=(team.rank,),
            severity=Severity.ADVICE if _IN_TURN.search(header) else None,
            notes=[
                f"{took_s:.1f} s from the first start to the last end, and never two at a time",
                *([f"loop: `{header}`"] if header else []),
            ],
            help="start all of them in one loop, then join all of them in another",
        )


def _together(team: Team) -> list[list[Worker]]:
    """Workers of one statement that were all given the same shared model and stepped a shared one, two and more, all ended well."""
    found: dict[tuple[str, int, int], list[Worker]] = {}
    for worker in team.workers:
        for model in worker.models:
            if worker.where is not None and worker.steps_shared and model.shared and model.serial >= 0 and model.shapes in worker.trained_shapes:
                found.setdefault((worker.where.file, worker.where.line, model.serial), []).append(worker)
    return [group for group in found.values() if len(group) > 1 and all(w.ended_well and not (w.joined and w.joined["left"]) for w in group)]


def _joined_ns(worker: Worker) -> int:
    return worker.joined.t_ns if worker.joined is not None else 1 << 63


def _looked_between(team: Team, group: list[Worker]) -> bool:
    """The parent used a model, or trained, between two of them: each builds on what the one before has left."""
    seen = [e.t_ns for kind in ("model_used", "save", "load_state") for e in team.parent.of(kind)] + list(team.parent.column("t_ns"))
    return any(_joined_ns(a) <= t <= b.started.t_ns for a, b in itertools.pairwise(group) for t in seen)
