"""Sampled gradient values, after the backward and at the step: what a hand-written sync did to them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from harness.probe import protocol
from harness.record import Event, Run

TINY = 1e-7
REDUCTIONS = {"all_reduce", "reduce", *protocol.REDUCE_SCATTER_INTO}


def _columns(run: Run) -> Iterator[list[Event]]:
    """ "gradients" events of one (step, optimizer), a rank each."""
    tables = [{(e.step, e["opt"]): e for e in r.of("gradients")} for r in run.present]
    for key in sorted(set(tables[0]).intersection(*tables[1:])) if tables else ():
        yield [t[key] for t in tables]


def _synced(event: Event) -> dict[str, list[float]]:
    """Values after a hand-written sync and before a clip."""
    return event["synced"] or event["at_step"] or {}


def _own(events: list[Event], hooked: bool) -> list[dict[str, list[float]]]:
    """What each rank's gradients were before anybody reduced them: before DDP's communication hook or the script's own, else after the backward."""
    if hooked or all(e["own"] for e in events):
        return [e["hooked" if hooked else "own"] for e in events]
    return [e["local"] or {} for e in events]


def by_hook(run: Run) -> bool:
    """Whether a communication hook of DDP reduces the gradients, and both sides of it were seen."""
    return any(e["own"] for _, e in run.events("gradients"))


def ratios(run: Run) -> list[tuple[int, int, float]]:
    """(optimizer, step, gradient at the step / sum of the ranks' own gradients), one a parameter and step, where a hand-written sync came between.

    1 means summed, 1 / world_size averaged. A parameter counts where the ranks' own gradients differ and those at the step agree. Where
    gradients were scaled up for float16 and scaled down before the step, that factor is taken out. Reductions that begin inside the backward are left
    out where nobody saw what was before.
    """
    found: list[tuple[int, int, float]] = []
    begun, by_hooks = _begun_inside(run), _reduced_by_hooks(run)
    for events in _columns(run):
        hooked = events[0].step in by_hooks and all(e["hooked"] for e in events)
        if events[0].step in begun and not hooked and not all(e["own"] for e in events):
            continue
        own, scale = _own(events, hooked), _scale(run, events[0])
        for key in own[0]:
            local = [values.get(key) for values in own]
            step = [_synced(e).get(key) for e in events]
            if any(v is None for v in (*local, *step)) or all(v == local[0] for v in local) or any(v != step[0] for v in step):
                continue
            total = [sum(values) for values in zip(*local, strict=True)]
            if not 0 < sum(t * t for t in total) < math.inf or sum(abs(t) for t in total) < TINY or len(total) != len(step[0] or ()):
                continue
            # least squares through the origin: one number a parameter, robust against small elements
            ratio = sum(s * t for s, t in zip(step[0], total, strict=True)) / sum(t * t for t in total)  # type: ignore[arg-type]
            found.append((int(events[0]["opt"] or 0), events[0].step, ratio * scale))
    return found


def _begun_inside(run: Run) -> set[int]:
    """Steps in which hooks of the script's own began to reduce gradients inside the backward: what they did to them before is not known behind it, nor
    whether an asynchronous reduction was over by then."""
    return {e.step for _, e in run.events("coll") if e["grad"] and e["inside"] and not e["hook"]}


def _reduced_by_hooks(run: Run) -> set[int]:
    """Steps at which something was reduced inside the backward, by no DDP: what hooks on parameters were given is the ranks' own there. Other hooks
    change gradients, and reduce nothing."""
    if any(True for _ in run.events("wrap")):
        return set()
    return {e.step for _, e in run.events("coll") if e["inside"] and not e["hook"] and e["op"] in REDUCTIONS}


def _scale(run: Run, event: Event) -> float:
    """What GradScaler divided by between the hook and the step; 1 where there is none, or where the samples were taken before it did."""
    local, synced = event["local"] or {}, _synced(event)
    index = run.present[0].step_index.get(event.step)
    scale = run.present[0].row(index).scale if index is not None and event["own"] else 0.0
    same = all(local.get(k) == v for k, v in synced.items())
    return scale if scale > 0 and not same else 1.0


def written(run: Run, opt: int) -> tuple[list[int], float | None]:
    """(ranks whose gradients of this optimizer the script writes between the last backward and every step that was looked at, the one factor that
    would explain all of it). Nobody, where fewer than three steps were looked at."""
    ranks, factors, num = list(range(len(run.present))), set(), 0
    for events in _columns(run):
        if int(events[0]["opt"] or 0) != opt:
            continue
        num += 1
        for rank, event in enumerate(events):
            local, synced = event["local"] or {}, _synced(event)
            pairs = [(local[k], synced[k]) for k in local if synced.get(k) is not None and any(local[k])]
            if rank in ranks and (not pairs or any(a == b for a, b in pairs)):
                ranks.remove(rank)
            factors |= {_factor(a, b) for a, b in pairs if a != b}
    found = {None if f is None else float(f"{f:.3g}") for f in factors}
    return (ranks, found.pop() if len(found) == 1 else None) if num >= 3 else ([], None)


def made_by_hand(run: Run, opt: int) -> bool:
    """Whether the gradients that every step of this optimizer takes are written by the script, on every rank: no backward made them, or others. One that
    a factor takes from the one to the other tells nothing: the script may have divided it before it was reduced."""
    told = [event for events in _columns(run) if int(events[0]["opt"] or 0) == opt for event in events]
    return bool(told) and all(_synced(e) and all((e["local"] or {}).get(k) != v for k, v in _synced(e).items()) and not _only_scaled(e) for e in told)


def _only_scaled(event: Event) -> bool:
    local = event["local"] or {}
    return all(k in local and _factor(local[k], v) is not None for k, v in _synced(event).items())


def _factor(local: list[float], step: list[float]) -> float | None:
    """What the gradient was multiplied by; None where no one number explains it."""
    square = sum(a * a for a in local)
    factor = sum(a * b for a, b in zip(local, step, strict=False)) / square if square else 0.0
    return factor if all(abs(b - factor * a) <= 1e-4 * abs(factor) * square**0.5 for a, b in zip(local, step, strict=False)) else None


def own_factors(run: Run, opt: int) -> list[tuple[float, ...]]:
    """A step each: what each rank's gradients are of the first rank's before a clip, one number for all that was sampled, although what the backwards left
    are no multiples of each other. Empty where a step is otherwise, or where they are the same."""
    found: list[tuple[float, ...]] = []
    by_hooks = _reduced_by_hooks(run)
    for events in _columns(run):
        if int(events[0]["opt"] or 0) != opt:
            continue
        own_of = _own(events, events[0].step in by_hooks and all(e["hooked"] for e in events))
        tables = [[_flat(values, _synced(events[0])) for values in side] for side in ([_synced(e) for e in events], own_of)]
        if any(v is None for table in tables for v in table) or sum(map(bool, tables[0][0] or ())) < LEAST_VALUES:
            return []
        synced, own = ([_factor(table[0] or [], values or []) for values in table] for table in tables)
        if None in synced or None not in own:
            return []
        found.append(tuple(f for f in synced if f is not None))
    apart = any(abs(f - 1) > 1e-3 for factors in found for f in factors)
    return found if apart and len(found) > 1 else []


LEAST_VALUES = 8


def _flat(values: dict[str, list[float]], like: dict[str, list[float]]) -> list[float] | None:
    """None where these are not the same elements."""
    if any(len(values.get(k) or ()) != len(v) for k, v in like.items()):
        return None
    return [x for k in like for x in values[k]]


def changed_apart(run: Run, opt: int) -> tuple[float | None, ...]:
    """Where all sampled gradients of this optimizer agree after the backward, and differ at the step on the first step that they do: the factor
    that each rank's were multiplied by; None for a rank where no one number explains it. Empty where they differ after the backward already."""
    for events in _columns(run):
        if int(events[0]["opt"] or 0) != opt or any(e["own"] for e in events):
            continue
        keys = [k for k in events[0]["local"] or {} if all((e["local"] or {}).get(k) and (e["at_step"] or {}).get(k) for e in events)]
        if not keys or any((e["local"])[k] != (events[0]["local"])[k] for e in events for k in keys):
            return ()
        apart = [k for k in keys if any((e["at_step"])[k] != (events[0]["at_step"])[k] for e in events)]
        if apart:
            tables = [{_rounded(_factor(e["local"][k], e["at_step"][k])) for k in apart if any(e["local"][k])} for e in events]
            return tuple(t.pop() if len(t) == 1 else None for t in tables)
    return ()


def _rounded(factor: float | None) -> float | None:
    return None if factor is None else float(f"{factor:.3g}")


def rescaled(run: Run) -> bool:
    """Whether gradients are multiplied by something between the last backward and the step (on one rank, DDP's averaging being over by then)."""
    for events in _columns(run):
        for event in events:
            for key, local in (event["local"] or {}).items():
                step = _synced(event).get(key)
                if step is not None and any(abs(a - b) > 1e-4 * max(abs(a), TINY) for a, b in zip(local, step, strict=False)):
                    return True
    return False


def averaged(run: Run) -> bool:
    """Whether a hand-written sync leaves the ranks' mean, and nothing else is done to it before a clip or the step."""
    found = [ratio * run.world_size for _, _, ratio in ratios(run)]
    return len(found) > 1 and all(abs(f - 1) < 1e-3 for f in found)


def agreeing(run: Run, opt: int) -> set[str]:
    """Parameters whose gradients are there and agree on all ranks at every step whose details were kept."""
    names = run.present[0].param_names(opt)
    good = set(range(len(names)))
    keys = [k for k in run.present[0].details if k[1] == opt]
    for key in keys:
        columns = [r.details.get(key) for r in run.present]
        if any(c is None for c in columns):
            continue
        values = [c[0] for c in columns if c is not None]
        good = {i for i in good if i < len(values[0]) and values[0][i] and len({v[i] for v in values if i < len(v)}) == 1}
    return {names[i] for i in good}


def _fates(run: Run) -> tuple[set[tuple[int, str]], set[tuple[int, str]]]:
    """(parameters whose gradients differ locally and agree once synced, those that do not), by (optimizer, name), from the sampled ones."""
    agree: set[tuple[int, str]] = set()
    differ: set[tuple[int, str]] = set()
    for events in _columns(run):
        names, opt = events[0]["names"] or {}, int(events[0]["opt"] or 0)
        for key in events[0]["local"] or {}:
            local = [(e["local"] or {}).get(key) for e in events]
            synced = [_synced(e).get(key) for e in events]
            if any(v is None for v in (*local, *synced)) or all(v == local[0] for v in local):
                continue
            (agree if all(v == synced[0] for v in synced) else differ).add((opt, str(names.get(key, key))))
    return agree, differ


def lone(run: Run, opt: int) -> list[str]:
    """Parameters whose gradients are there on one rank alone, the same one at every step looked at: a part of the model that is this rank's."""
    owners: dict[str, set[tuple[int, ...]]] = {}
    for events in _columns(run):
        if int(events[0]["opt"] or 0) == opt:
            names = events[0]["names"] or {}
            for key in set().union(*(e["local"] or {} for e in events)):
                owners.setdefault(str(names.get(key, key)), set()).add(tuple(any((e["local"] or {}).get(key) or ()) for e in events))
    return sorted(name for name, seen in owners.items() if len(seen) == 1 and sum(next(iter(seen))) == 1 < run.world_size)


def ever_agree(run: Run) -> bool:
    return bool(_fates(run)[0])


def partly(run: Run, opt: int) -> tuple[list[str], list[str]]:
    """(parameters of any optimizer that are synced, those of this one that never are); both empty where the samples do not tell."""
    agree, differ = _fates(run)
    return sorted({name for _, name in agree}), sorted(name for o, name in differ - agree if o == opt)


def equal_unsynced(run: Run, opt: int, names: set[str]) -> bool:
    """Whether these gradients agree although nobody reduces them, as the ranks read the same data: of those whose values were sampled, each is
    equal on all ranks right after the backward. False where none was, and where a step has several backwards: what was reduced after the first
    one is equal after the last one too, if that did not reach it."""
    if any(max(r.column("num_backward"), default=0) > 1 for r in run.present):
        return False
    seen = False
    for events in _columns(run):
        if int(events[0]["opt"] or 0) != opt:
            continue
        known = events[0]["names"] or {}
        for key, first in (events[0]["local"] or {}).items():
            local = [(e["local"] or {}).get(key) for e in events]
            if str(known.get(key, key)) in names and any(v and any(v) for v in local):
                if any(v != first for v in local):
                    return False
                seen = True
    return seen
