"""Ranks that train together at first, and part for good from some step on although their reductions go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from harness.checks.syn import gradients, replicas
from harness.record import Event, Recording, Run, number

MIN_APART = 3  # steps with differing gradients behind those that agree: fewer may be the end of a run
REDUCING = ("all_reduce", "reduce")


def parted(run: Run, opt: int, parting: replicas.Parting) -> int | None:
    """The first step from which on gradients and parameters differ at every step that was hashed, to the last one; 0 where they do from the start.
    None where they ever agree behind it, or where some gradients go on agreeing (SYN128's)."""
    if parting.num_grad == parting.steps == parting.num_param:
        return 0
    start = _parting_for_good(parting)
    return None if gradients.agreeing(run, opt) else start


def _parting_for_good(parting: replicas.Parting) -> int | None:
    if not parting.grad_step or parting.num_returns or not parting.apart or parting.num_grad < MIN_APART:
        return None
    return parting.grad_step if parting.param_step == parting.grad_step and parting.num_param == parting.num_grad else None


def lost(run: Run, opt: int, parting: replicas.Parting) -> list[str]:
    """Parameters whose gradients were equal, or not there, before some step, and differ from it on wherever it was kept, the parameters never coming
    together again. Empty where one of them begins later than the others."""
    start = _parting_for_good(parting)
    if start is None or not replicas.starts_equal(run, opt) or replicas.agreements(run, opt, start):
        return []
    apart = None
    for step in sorted(s for s, o in run.present[0].details if o == opt and s >= start):
        tables = [_gradients(r, opt, step) for r in run.present]
        found = {n for n in tables[0] if len({t.get(n) for t in tables}) > 1}
        apart = found if apart is None else apart & found
    return [n for n in parting.grad_names if n in (apart or ())]


def _gradients(recording: Recording, opt: int, step: int) -> dict[str, int]:
    values, _ = recording.details.get((step, opt), ((), ()))
    return dict(zip(recording.param_names(opt, step), values, strict=False))


def in_parcels(run: Run, params: Event | None, beside: int) -> list[Event]:
    """Reductions on the first rank, between a backward and its step, that carry the gradients in several tensors: as many numbers as the trained
    parameters have at each of these steps, and at most so many more."""
    steps: dict[int, list[Event]] = {}
    for e in run.present[0].of("coll"):
        if e["graded"] and e["op"] in REDUCING and not e["inside"] and number(e["numel"]) > 0:
            steps.setdefault(e.step, []).append(e)
    total = sum(n for n, wanted in zip(params["numels"] or (), params["requires_grad"] or (), strict=False) if wanted) if params else 0
    return [e for events in steps.values() if total and 0 <= sum(number(e["numel"]) for e in events) - total <= beside for e in events]


def left_alone(run: Run, opt: int, start: int) -> bool:
    """Whether, at the steps from `start` on whose values were kept, each rank's gradient is what its backward left."""
    told = [e for r in run.present for e in r.of("gradients") if e["opt"] == opt and e.step >= start and e["local"]]
    return bool(told) and all(e["local"] == (e["synced"] or e["at_step"]) for e in told)


def stale(run: Run, calls: Sequence[Event]) -> bool:
    """Whether all ranks put the same into most of these reductions: what was reduced before, for gradients of the ranks' own data differ."""
    tables = [{_key(e): e["sent"] for e in r.of("coll") if e["sent"]} for r in run.present]
    keys = {_key(e) for e in calls}.intersection(*tables)
    return bool(keys) and 2 * sum(len({t[k] for t in tables}) == 1 for k in keys) > len(keys)


def _key(call: Event) -> tuple[object, ...]:
    return call.step, call["n"], call["numel"]


def _reductions(run: Run, opt: int) -> dict[int, list[Event]]:
    """The first rank's, by an optimizer's step before which they come; up to the last that was told."""
    rows = run.present[0]
    calls = [e for e in rows.of("coll") if (e["graded"] or e["inside"]) and e["op"] in replicas.MOVERS]
    last = max((e.step for e in rows.of("coll")), default=-1)
    steps: dict[int, list[Event]] = {s: [] for s, o in zip(rows.column("step"), rows.column("opt"), strict=True) if o == opt and s <= last}
    for e in calls:
        if e.step in steps:
            steps[e.step].append(e)
    return steps


def goes_on(run: Run, opt: int, start: int) -> bool:
    """Whether what is reduced at each step before `start` is reduced at most steps behind it too, by number and size: else the script has chosen to stop."""
    sizes = {s: Counter(e["numel"] for e in calls) for s, calls in _reductions(run, opt).items()}
    before, behind = [c for s, c in sizes.items() if s < start], [c for s, c in sizes.items() if s >= start]
    if not before or not behind:
        return False
    usual = before[0]
    for each in before[1:]:
        usual &= each
    return bool(usual) and 2 * sum(usual <= c for c in behind) > len(behind)


def some_stale(run: Run, opt: int, start: int, names: Sequence[str]) -> bool:
    """Whether, from `start` on, reductions of one size that could hold these parameters carry what was reduced before, or whether nobody told."""
    params = run.present[0].params_at(opt, start)
    least = min((n for name, n in zip(params["names"] or (), params["numels"] or (), strict=False) if name in names), default=0) if params else 0
    sizes: dict[int, list[Event]] = {}
    for e in (e for s, calls in _reductions(run, opt).items() if s >= start for e in calls if number(e["numel"]) >= max(2, least)):
        sizes.setdefault(number(e["numel"]), []).append(e)
    told = any(e["sent"] for calls in sizes.values() for e in calls)
    return not told or any(stale(run, calls) for calls in sizes.values())


def without_gradients(run: Run, opt: int, start: int, names: Sequence[str]) -> bool:
    """Whether none of these parameters had a gradient before."""
    tables = [_gradients(r, opt, s) for r in run.present for s, o in r.details if o == opt and s < start]
    return bool(tables) and not any(t.get(n) for t in tables for n in names)


def averaged_at_the_end(run: Run, numels: Sequence[int]) -> bool:
    """Whether the script averages, or sends round, as many parameters as the model has behind the last step: members of their own until then."""
    last = max(run.present[0].column("step"), default=0)
    moved = Counter(number(e["numel"]) for e in run.present[0].of("coll") if e.step > last and e["op"] in replicas.MOVERS)
    return bool(numels) and (sum(numels) in moved or Counter(numels) <= moved)
