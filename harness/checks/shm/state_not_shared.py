"""SHM104 optimizer-state-not-shared: each worker keeps its own momentum for a model that all of them change.

What it does
    Asks each training process whether the state of its optimizer lies in shared memory while the parameters do, and whether a count of steps
    in a shared state is a number of Python's, or a tensor, of each process's own.

Why it is bad
    Adam's moments and step counts of one worker know nothing of the other workers' steps. It often trains all the same; the learning rate
    that is right for one process is then too large for many.

Wrong
    optimizer = Adam(shared.parameters(), lr=1e-3)        # in each worker

Right
    optimizer = SGD(shared.parameters(), lr=1e-2)         # no state; or an Adam whose state tensors are shared before the start

Known limits
    Advice where each worker makes its own optimizer: that is a choice, and PyTorch's own hogwild example's. A warning where one optimizer
    was made before the processes and handed to them all.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.shm import workers
from harness.model import Finding, Severity
from harness.record import Event, Run, number, where_of


class OptimizerStateNotShared(Check):
    code = "SHM104"
    name = "optimizer-state-not-shared"
    severity = Severity.ADVICE

    def end(self, run: Run) -> Iterable[Finding]:
        told = [
            (team, w, e)
            for team in workers.teams(run)
            for w in team.workers
            if w.recording is not None
            for e in w.recording.of("child_models")
            if number(e["shared"]) > 0
        ]
        if not told:
            raise NotApplicable("no process steps a shared model")
        counts = [(t, w, e) for t, w, e in told if e["counters"] and number(e["state_shared"]) == number(e["state"]) > 0]
        if len({id(w) for _, w, _ in counts}) > 1:
            yield self._counter(*counts[0], len({id(w) for _, w, _ in counts}))
            return
        private = [(t, w, e) for t, w, e in told if number(e["state"]) > 0 and number(e["state_shared"]) == 0]
        if len({id(w) for _, w, _ in private}) < 2:
            return
        team, worker, event = private[0]
        # made in the parent and handed over: meant to be one, and is a copy in each process
        inherited = all(not w.recording.of("optimizer_made") for _, w, _ in private if w.recording is not None)
        yield self.finding(
            f"each of {len({id(w) for _, w, _ in private})} workers keeps its own {event['kind']} state for one shared model",
            where=worker.where,
            ranks=(team.rank,),
            notes=[
                f"{event['state']} state tensors, none shared; {event['shared']} parameters shared",
                *(["the optimizer was made before the processes and handed to them"] if inherited else []),
            ],
            severity=Severity.WARNING if inherited else None,
            help="use an optimizer without state, or create and share its state before the processes start",
        )

    def _counter(self, team: workers.Team, worker: workers.Worker, event: Event, num: int) -> Finding:
        """The moments are shared, the number of steps that they have seen is not."""
        name = str(event["counters"][0])
        return self.finding(
            f"the {event['kind']} state of the shared model is shared, but each of {num} workers counts its `{name}` for itself",
            where=where_of(event["counted_at"]) or worker.where,
            ranks=(team.rank,),
            notes=[f"{event['state']} state tensors, all shared: they have seen the steps of all workers, the bias correction one worker's"],
            severity=Severity.WARNING,
            help=f"make `{name}` a tensor and share it as well: `state[{name!r}] = torch.zeros(1).share_memory_()`",
        )
