"""SHM105 shared-model-never-updated: the model is shared, but the workers' steps land elsewhere.

What it does
    Compares the shared parameters before the first process starts and after the last is joined, where the processes have trained a model
    of the same shapes. Also single parameters of it: those that a worker has taken out of shared memory and steps there, while the others change.

Why it is bad
    The optimizer holds a local copy, or `p.data = ...` makes new private tensors, as `vector_to_parameters()` does: each worker improves, the
    shared model stays as it was. So it does where the worker is given a copy: `copy.deepcopy()` of a shared model is private again.
    `model.to(memory_format=torch.channels_last)`, or a cast, in the worker gives the parameters that it changes memory of the worker's own:
    the convolutions are trained in private, the rest is shared, and the parent's model is a mixture of the two.

Wrong
    local = copy.deepcopy(shared)
    optimizer = SGD(local.parameters(), lr)               # nothing writes back

Right
    optimizer = SGD(shared.parameters(), lr)
    for p, s in zip(local.parameters(), shared.parameters()):
        s.grad = p.grad                                   # then optimizer.step()
    model = Net().to(memory_format=torch.channels_last).share_memory()      # converted first, in the parent

Known limits
    Silent where a copy is given and the parent does not look at the shared model afterwards, where the parent trains or loads state
    afterwards, where the workers only evaluate, and where a worker failed. Single parameters are told where no worker moves the shared ones and the
    parent, once all are joined, calls the model (a finding) or saves them (advice); a worker is asked at its 3rd, 9th and 65th step.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.shm import takenout, workers
from harness.model import Finding, Severity, Where
from harness.probe import protocol
from harness.record import Run, where_of


class SharedModelNeverUpdated(Check):
    code = "SHM105"
    name = "shared-model-never-updated"
    severity = Severity.ERROR

    def end(self, run: Run) -> Iterable[Finding]:
        teams = [t for t in workers.teams(run) if any(w.trained for w in t.workers)]
        if not teams:
            raise NotApplicable("no process of the script's own trains")
        if not any(m.shared for t in teams for w in t.workers for m in w.models):
            raise NotApplicable("no model is shared with other processes")
        for one in sorted(workers.untouched(run), key=lambda one: one.model.outside):
            lost, rebound = _unshared(one)
            where = one.model.copied or rebound or _step_site(one) or one.workers[0].where
            if not one.model.shared or (one.model.outside and not one.used):
                continue
            steps = sum(w.steps for w in one.workers)
            yield self.finding(
                f"the shared `{one.model.kind}` never changes: "
                f"{workers.counted(one.workers, 'worker', 'workers')} took {steps} steps on other tensors",
                where=where,
                ranks=(one.team.rank,),
                notes=[f"its {one.model.num} parameters are bit-identical before and after", *lost, *_what(one)],
                help="build the optimizer on the shared model's parameters and give them the gradients; change them in place "
                "(`p.add_(...)`, not `p.data = ...`)",
                evidence={"workers": len(one.workers), "steps": steps},
            )
            return  # a private copy beside the shared model shows the same mistake once more
        for part in takenout.read(run):
            yield self._part(part)

    def _part(self, part: takenout.TakenOut) -> Finding:
        """Some parameters of a model whose others do change."""
        return self.finding(
            f"{workers.counted(part.workers, 'worker', 'workers')} took `{', '.join(part.names[:4])}` of the shared `{part.kind}` out of shared memory and "
            "trained a private copy: the shared ones never change",
            where=part.at or part.workers[0].where,
            ranks=(part.team.rank,),
            severity=None if part.computed else Severity.ADVICE,
            notes=[
                f"bit-identical before and after: {workers.counted(part.names, 'parameter', 'parameters')}; {part.num_changed} shared ones have changed",
                f"the parent {'computes with them' if part.computed else 'saves them'} after the join" + (f", on line {part.use.line}" if part.use else ""),
            ],
            help="convert the model before `share_memory()` and the start of the processes: another memory format, dtype or `p.data = ...` in a worker is "
            "memory of its own; change what is shared in place",
            evidence={"workers": len(part.workers), "names": part.names},
        )


def _unshared(one: workers.Untouched) -> tuple[list[str], Where | None]:
    """Whether a worker's parameters lay in shared memory at first and no more after a step, and the one statement of its file that could do that."""
    events = [e for w in one.workers if w.recording is not None for e in w.recording.of("unshared")]
    if not events:
        return [], None
    places = [w for site in events[0]["at"] or () if (w := where_of(site)) is not None]
    note = f"{events[0]['num']} tensors of a worker lay in shared memory and lie in its own since its first step: their `.data` was assigned"
    return [note], places[0] if len(places) == 1 else None


def _step_site(one: workers.Untouched) -> Where | None:
    """Where the workers made what they trained: the copy of the model, or the optimizer if it stands in the same function."""
    recording = one.workers[0].recording
    if recording is None:
        return None
    by_hand = any(e["opt"] == protocol.OPT_BY_HAND for e in recording.of("params"))
    copies = [e.where for e in recording.of("module_copied") if e.where is not None]
    made = [e.where for e in recording.of("optimizer_made") if e.where is not None and not by_hand]
    computed = [e.where for e in recording.of("loss") if e.where is not None]
    if copies and made and copies[0].function == made[0].function:
        return made[0]
    return next(iter([*copies, *made, *computed]), None)


def _what(one: workers.Untouched) -> list[str]:
    if one.model.outside:
        return ["the processes are given a copy of it, whose memory is not shared with the parent"]
    shared = [e["shared"] for w in one.workers if w.recording is not None for e in w.recording.of("child_models")]
    held = [e["num"] for w in one.workers if w.recording is not None for e in w.recording.of("child_models")]
    return [f"the workers' optimizer holds {held[0]} tensors, {shared[0]} of them shared"] if shared and held else []
