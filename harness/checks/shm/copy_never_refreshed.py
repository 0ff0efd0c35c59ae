"""SHM111 copy-never-refreshed: gradients are computed on a copy of the model that is never given the weights that the optimizer trains.

What it does
    Looks for a model whose parameters receive the gradients of every backward, are in no optimizer and never change, while an optimizer whose
    parameters are of the same sizes, and which no backward reaches, is given gradients and steps them.

Why it is bad
    An actor of A3C, a worker that pulls from shared memory, a half-precision copy of float32 weights: each must take the new weights over
    before it computes the next gradient. Here all gradients are those of the first weights: the model is pushed in one direction for ever.

Wrong
    local.load_state_dict(shared.state_dict())
    for batch in loader:
        loss(local, batch).backward()
        for p, s in zip(local.parameters(), shared.parameters()):
            s.grad = p.grad.clone()
        optimizer.step()

Right
    for batch in loader:
        local.load_state_dict(shared.state_dict())        # in every step, or every few
        loss(local, batch).backward()
        ...

Known limits
    Silent below 50 steps: workers may take the weights over every so many. Silent where the optimizer's parameters are reached by any backward
    that was looked at (a correction by the gradients of a snapshot), and where the step is made in another process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.opt import optimizers
from harness.checks.shm import workers
from harness.model import Finding, Severity, Where
from harness.probe.protocol import FLAG_ALL_NONE
from harness.record import Event, Recording, Run, number

MIN_STEPS = 50  # asynchronous SGD fetches every 5 to 50


class CopyNeverRefreshed(Check):
    code = "SHM111"
    name = "copy-never-refreshed"
    severity = Severity.ERROR
    explains = ("OPT112", "OPT113", "OPT122")

    def end(self, run: Run) -> Iterable[Finding]:
        stepped = [p for p in (*run.present, *(w.recording for t in workers.teams(run) for w in t.workers)) if p is not None and p.num_steps]
        if not any(optimizers.rows_of(p) for p in stepped):
            raise NotApplicable("no optimizer step was recorded")
        hit = [(p, found) for p in stepped if (found := _lent(p)) is not None]
        if not hit:
            return
        process, (params, num, steps) = hit[0]
        names = [str(p["name"]) for p in process.of("unstepped")[-1]["params"] or ()]
        yield self.finding(
            f"gradients are computed on {num} parameters that never change, and given to others of the same sizes: the copy never takes over "
            f"what {params['kind']} has trained, in {steps} steps",
            where=_filled_at(process, num) or optimizers.accumulated_at(process, number(params["opt"])) or params.where,
            ranks=sorted({max(p.rank, 0) for p, _ in hit}),
            notes=[f"unchanged since the first step: {', '.join(n for n in names[:3] if n)}", *_how_many(hit)],
            help="give the copy the trained weights inside the loop, before each forward: `local.load_state_dict(shared.state_dict())`",
            evidence={"steps": steps, "parameters": num},
        )


def _lent(process: Recording) -> tuple[Event, int, int] | None:
    """(the optimizer that steps with the gradients of a copy, parameters of the copy, steps)."""
    looks = process.of("unstepped")
    if not looks or not isinstance(looks[-1]["params"], list):
        return None
    last = looks[-1]
    told = [p for p in last["params"] if p["looks"] >= 3 and p["since"] <= 1]
    reached: Counter[int] = Counter()
    for look in looks:
        reached.update({int(opt): number(num) for opt, num in (look["opts"] or {}).items()})
    if len(told) < len(last["params"]) or len(told) < 2:
        return None
    for opt, places in optimizers.rows_of(process).items():
        params = optimizers.params_of(process, opt)
        if params is None or reached[opt] or opt not in reached or len(places) < MIN_STEPS or not _same_sizes(told, number(last["num"]), params):
            continue
        flags = process.column("flags")
        trained = len({row.param for row in process.all_rows() if row.opt == opt}) > 2
        if trained and not any(flags[i] & FLAG_ALL_NONE for i in places):
            return params, number(last["num"]), len(places)
    return None


def _same_sizes(told: list[Event], num: int, params: Event) -> bool:
    sizes = params["numels"]
    return isinstance(sizes, list) and len(sizes) == num and not Counter(p["numel"] for p in told) - Counter(sizes)


def _filled_at(process: Recording, num: int) -> Where | None:
    """The load that gave the copy its only weights."""
    first = next((row.t_ns for row in process.all_rows()), 0)
    loads = [e for e in process.of("load_state") if e.t_ns < first and not e["error"] and number(e["total"]) >= num]
    return loads[-1].where if loads else None


def _how_many(hit: list[tuple[Recording, tuple[Event, int, int]]]) -> list[str]:
    return [f"so it is in {len(hit)} processes"] if len(hit) > 1 else []
