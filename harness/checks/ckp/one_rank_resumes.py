"""CKP106 resume-on-one-rank: some ranks restore the optimizer, the schedule or the model, the others do not, and training goes on.

What it does
    Compares which ranks called `load_state_dict`, and whether lr, parameters or optimizer state differ between the ranks afterwards.

Why it is bad
    DDP broadcasts parameters and buffers when it wraps a model. It knows nothing of the optimizer: with equal gradients, ranks with and
    without momentum step differently, and the replicas drift apart.

Wrong
    if rank == 0:
        optimizer.load_state_dict(checkpoint["optimizer"])

Right
    optimizer.load_state_dict(checkpoint["optimizer"])     # on every rank, from the same file

Known limits
    A model that is loaded on rank 0 before DDP wraps it, or state that is broadcast to all, is healthy: what counts is whether the ranks
    differ afterwards. A load after the last step is silent.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.ckp import files
from harness.model import Finding, Severity
from harness.record import Event, Run

WHAT = {"load_optimizer": "the optimizer's state", "load_scheduler": "the schedule", "load_scaler": "the scaler", "load_state": "the model"}


class ResumeOnOneRank(Check):
    code = "CKP106"
    name = "resume-on-one-rank"
    severity = Severity.ERROR
    explains = ("SYN127", "SYN125", "OPT103", "OPT104", "OPT109", "OPT111", "OPT114")

    def end(self, run: Run) -> Iterable[Finding]:
        if len(run.present) < 2:
            raise NotApplicable("one rank")
        if not any(r.of(kind) for r in run.present for kind in WHAT):
            raise NotApplicable("no state is loaded")
        for kind, what in WHAT.items():
            having = [rank for rank, r in enumerate(run.ranks) if r is not None and self._trained_on(run, rank, kind)]
            lacking = [rank for rank, r in enumerate(run.ranks) if r is not None and not r.of(kind)]
            if not having or not lacking:
                continue
            first = self._trained_on(run, having[0], kind)[0]
            harm = self._harm(run, kind, first)
            if harm:
                yield self.finding(
                    f"{what} is restored on rank{'s' if len(having) > 1 else ''} {', '.join(map(str, having))} only; {harm}",
                    where=first.where,
                    ranks=having,
                    notes=[f"fresh state on {', '.join(f'rank {r}' for r in lacking)}, for {self._steps(run, first)} steps"],
                    help="load the checkpoint on every rank; DDP broadcasts parameters and buffers, nothing else",
                )
                return

    def _trained_on(self, run: Run, rank: int, kind: str) -> list[Event]:
        """Loads of this kind that were followed by steps."""
        recording = run.ranks[rank]
        return [e for e in recording.of(kind) if files.steps_after(recording, e) > 0 and not e["error"]] if recording is not None else []

    def _steps(self, run: Run, event: Event) -> int:
        return max((files.steps_after(r, event) for r in run.present), default=0)

    def _harm(self, run: Run, kind: str, event: Event) -> str:
        """In which way the ranks differ after the load; "" if they do not."""
        digests = {"load_scheduler": ("hyper",), "load_state": ("param",), "load_optimizer": ("hyper", "param"), "load_scaler": ()}[kind]
        names = {"hyper": "lr or another hyperparameter differs", "param": "the parameters differ"}
        before: dict[str, bool] = {}
        for step in run.steps():
            if not step.complete:
                continue
            for digest in digests:
                same = step.same(digest)
                if step.index < event.step:
                    before[digest] = same
                elif not same and before.get(digest, True):
                    return f"{names[digest]} between ranks from step {step.index} on"
            if kind == "load_scaler" and step.index >= event.step and len(set(step.number("scale"))) > 1:
                return f"the loss scale differs between ranks from step {step.index} on"
        return "its state differs between ranks at the end" if kind == "load_optimizer" and _states_differ(run) else ""


def _states_differ(run: Run) -> bool:
    """Optimizer state at the end, hashed bit by bit, where parameters are the same optimizer's."""
    by_opt: dict[object, list[object]] = {}
    for _, event in run.events("full"):
        by_opt.setdefault(event["opt"], []).append(event["state"])
    return any(state != group[0] for group in by_opt.values() for state in group[1:])
