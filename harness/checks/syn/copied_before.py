"""Weights beside those that DDP keeps equal, with which all ranks measure and which are each rank's own: an average that was copied before the wrap, and
what is put into the wrapped model for an evaluation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from harness.checks.evl import evaluations
from harness.checks.syn import replicas
from harness.record import Event, Run, number

ADDING = ("all_reduce", "reduce")


def wrapping(run: Run, others: Sequence[Mapping[str, Any]]) -> Event | None:
    """The wrap before which this model was copied on every rank, each rank's weights its own: at the first step it is what was wrapped there."""
    columns = [r.of("wrapping") for r in run.present]
    for events in zip(*columns, strict=False) if len(columns) == len(others) > 1 else ():
        own = [number(e["digest"]) for e in events]
        if len(set(own)) > 1 and all(d and d == o.get("first") for d, o in zip(own, others, strict=True)):
            first: Event = events[0]
            return first
    return None


def measured(run: Run, modules: set[str], besides: Collection[Any] = ()) -> bool:
    """Whether every rank measures with such a model, each on samples of its own and with other weights, none of them `besides` or those that are
    trained: the numbers are of several models."""
    columns = [[(e, w) for e in r.of("evaluated") if (w := _weights(e, modules, besides))] for r in run.present]
    for told in zip(*columns, strict=False) if len(columns) == run.world_size > 1 else ():
        together = len({e.where for e, _ in told}) == 1 and len({e["inputs"] for e, _ in told}) > 1
        if together and any(len(set(weights)) > 1 for weights in zip(*(w for _, w in told), strict=False)):
            return True
    return False


def _weights(event: Event, modules: set[str], besides: Collection[Any]) -> list[Any]:
    told = [w for w in event["weights"] or () if isinstance(w, list) and len(w) == 2 and w[0] in modules]
    return [digest for _, digest in told if digest not in besides and digest not in _wrapped(event)[:1]]


def _wrapped(event: Event) -> list[int]:
    """[digest of the wrapped model, backwards since the last step]; empty where it was not measured."""
    told = event["wrapped"]
    return told if isinstance(told, list) and len(told) == 2 and all(isinstance(n, int) for n in told) else []


def _put_in(event: Event) -> list[tuple[int, int]]:
    """What it was measured with later, without a step in between, and on what."""
    told = event["put_in"]
    return [(number(t[0]), number(t[1])) for t in told if isinstance(t, list) and len(t) == 2] if isinstance(told, list) else []


def put_in(run: Run) -> Sequence[Event] | None:
    """The first evaluation of the wrapped model, shared out among the ranks and added up, with weights that differ between them, where the weights
    that are trained are equal at every step and no backward has adapted them since."""
    partings = replicas.of(run).partings.values()
    whole = all(number(e["group_size"], run.world_size) == run.world_size for _, e in run.events("wrap"))
    if not whole or not any(p.steps for p in partings) or any(p.num_param for p in partings):
        return None
    columns = [
        [(e, *told) for e in r.of("evaluated") if (w := _wrapped(e)) and not w[1] for told in ((w[0], e["inputs"]), *_put_in(e))] for r in run.present
    ]
    rows = list(zip(*columns, strict=False)) if len(columns) == run.world_size > 1 else []
    for told in rows:
        events = [e for e, _, _ in told]
        apart = len({w for _, w, _ in told}) > 1 and len({inputs for _, _, inputs in told}) == len(events)
        if apart and not _draws(run, rows, events[0].step) and len({(e.where, e.step) for e in events}) == 1 and evaluations.told_behind(run, events[0], ADDING):
            return events
    return None


def _draws(run: Run, rows: Sequence[Sequence[tuple[Event, int, Any]]], step: int) -> bool:
    """Whether ranks put in ever other weights of their own without a step between, as draws of noise are: averages are one or two, and ranks that began
    with equal weights have none of their own."""
    own = {tuple(w for _, w, _ in told) for told in rows if {e.step for e, *_ in told} == {step} and len({w for _, w, _ in told}) > 1}
    several = min(len(set(weights)) for weights in zip(*own, strict=True)) if own else 0
    return several > 2 or (several == 2 and not began_apart(run))


def began_apart(run: Run) -> bool:
    """Whether the ranks' weights differed before DDP broadcast rank 0's."""
    return len({number(r.of("wrapping")[0]["digest"]) for r in run.present if r.of("wrapping")}) > 1
