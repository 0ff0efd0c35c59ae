"""SHM103 gradients-shared: worker processes write their gradients into the same memory.

What it does
    Asks each training process, at a step, whether the `.grad` tensors that it steps with lie in shared memory.

Why it is bad
    `share_memory()` shares gradients too if there are any. Workers then add into, zero and step with each other's gradients.

Wrong
    loss.backward()                      # allocates gradients in the parent
    model.share_memory()
    ...                                  # workers: optimizer.zero_grad(set_to_none=False)

Right
    model.share_memory()                 # before there are gradients
    ...                                  # workers: optimizer.zero_grad(), which sets them to None

Known limits
    One process that collects gradients on purpose and steps alone is healthy.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.shm import workers
from harness.model import Finding, Severity, Where
from harness.record import Run, number


class GradientsShared(Check):
    code = "SHM103"
    name = "gradients-shared"
    severity = Severity.ERROR
    explains = ("OPT102",)

    def end(self, run: Run) -> Iterable[Finding]:
        teams = [t for t in workers.teams(run) if any(w.trained for w in t.workers)]
        if not teams:
            raise NotApplicable("no process of the script's own trains")
        for team in teams:
            hit = [
                (w, e)
                for w in team.workers
                if w.recording is not None
                for e in w.recording.of("child_models")
                if number(e["grads_shared"]) > 0
            ]
            if len({id(w) for w, _ in hit}) < 2:
                continue
            worker, event = hit[0]
            given = sum(number(m.data.get("grads")) for m in worker.models)
            yield self.finding(
                f"{len({id(w) for w, _ in hit})} workers step with gradients that lie in shared memory",
                where=(_shared_at(run, team.rank) if given else None) or worker.where,
                ranks=(team.rank,),
                notes=[
                    f"{event['grads_shared']} of {event['num']} gradients are shared",
                    f"{given} gradients existed when the process was started" if given else "the workers share them themselves",
                ],
                help="call `share_memory()` before any gradient exists, or `zero_grad(set_to_none=True)` before the processes start",
                evidence={"grads_shared": event["grads_shared"]},
            )
            return


def _shared_at(run: Run, rank: int) -> Where | None:
    """The last call of share_memory() on a model in the parent, which took the gradients along."""
    recording = run.ranks[rank]
    events = recording.of("share_memory") if recording is not None else []
    calls = [e.where for e in events if e.where is not None and e["kind"] not in ("Tensor", "Parameter")]
    return calls[-1] if calls else None
