"""SHM101 share-memory-forgotten: worker processes train copies of the parent's model.

What it does
    Looks at the models that a started process has in reach, whether their parameters lie in shared memory, what the process trained, and
    whether the parent's model has changed once all processes have been joined. Also at single parameters of a model that share_memory() was
    called on: those that were put in behind that call, or given other data, and that the workers then train in memory of their own. A finding
    where the parent computes with them afterwards as they were at the start; advice where it only saves them.

Why it is bad
    A forked child gets a copy of all memory at the first write. Each worker's loss falls, the parent evaluates and saves the untrained
    model.

Wrong
    model = Net()
    workers = [mp.Process(target=train, args=(model,)) for _ in range(4)]     # start method fork

Right
    model = Net()
    model.share_memory()          # before the processes are started
    workers = ...

    model.share_memory()
    model.words.weight.data.copy_(vectors)     # write into what is shared: `model.words = nn.Embedding...` would be private again

Known limits
    Where share_memory() was called on the very model and its parameters lie in private memory all the same, the finding stands on that call.
    Silent where the parent never looks at the model again (workers that try out settings on copies), or trains or loads state afterwards:
    the results came back another way. Spawn and forkserver share what they are
    passed, but not a global of the script. A part of a model is told only where share_memory() was called on the whole, the workers have moved it
    by their second, 9th or 65th step, and the parent calls the module that holds it or saves it, after it has joined them all: a part that each
    worker makes for itself, that is frozen, or that the parent leaves alone, may be private on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.shm import halves, workers
from harness.model import Finding, Severity, Where
from harness.record import Recording, Run


class ShareMemoryForgotten(Check):
    code = "SHM101"
    name = "share-memory-forgotten"
    severity = Severity.ERROR

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(w.trained for team in workers.teams(run) for w in team.workers):
            raise NotApplicable("no process of the script's own trains")
        told: set[tuple[str, int]] = set()
        for one in workers.untouched(run):
            start = one.workers[0].where
            where = one.model.made or start
            place = (where.file, where.line) if where else ("", 0)
            if one.model.shared or not one.used or place in told:
                continue
            told.add(place)
            asked = _asked(one.team.parent, one.model.id, one.workers[0].started.t_ns)
            steps = sum(w.steps for w in one.workers)
            yield self.finding(
                f"{workers.counted(one.workers, 'process', 'processes')} trained `{one.model.kind}` without sharing it: "
                "its parameters are not in shared memory"
                + (f", though line {asked.line} asked for it: their data was bound anew between there and the start" if asked else ""),
                where=asked or where,
                ranks=(one.team.rank,),
                notes=[
                    f"the parent's {one.model.num} tensors are bit-identical after {steps} steps of the workers",
                    _started(one.workers[0].method, start),
                ],
                help="share the model last: vector_to_parameters(), `p.data = ...`, a cast or a new layer behind share_memory() puts private memory in its place"
                if asked
                else "call `model.share_memory()` before the processes are started",
                evidence={"workers": len(one.workers), "steps": steps},
            )
        for half in halves.read(run):
            yield self._half(half)

    def _half(self, half: halves.Half) -> Finding:
        """Some parameters of a model that was shared."""
        named = f"`{', '.join(half.names[:4])}` of `{half.kind}`"
        return self.finding(
            f"{workers.counted(half.workers, 'process', 'processes')} trained {named} in memory of {'its' if len(half.workers) == 1 else 'their'} own: "
            + ("put in" if half.put else "given other data")
            + f" after share_memory(), not shared as the model's {half.num_shared} other trainable parameters are",
            where=half.put or half.asked or half.where,
            ranks=(half.team.rank,),
            severity=None if half.computed else Severity.ADVICE,
            notes=[
                *([f"share_memory() was called before, on line {half.asked.line}"] if half.asked and half.put else []),
                f"the parent {'computes with them' if half.computed else 'saves them'} after the join"
                + (f", on line {half.use.line}," if half.use else "")
                + " bit by bit as they were at the start",
            ],
            help="call share_memory() last, or write into what is shared: `with torch.no_grad(): p.copy_(values)`; put in or bound anew, it is private",
            evidence={"workers": len(half.workers), "names": half.names},
        )


def _asked(parent: Recording, model: int, before_ns: int) -> Where | None:
    """Where share_memory() of this very model was called before its first process was started."""
    return next((e.where for e in parent.of("share_memory") if e["id"] == model and e.t_ns < before_ns and e.where is not None), None)


def _started(method: str, where: Where | None) -> str:
    return f"start method {method}" + (f", line {where.line}: `{where.text}`" if where is not None else "")
