"""Optimizers as the checks of this family see them: their rows and their "params" events, rank by rank."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.checks import regime
from harness.model import Where
from harness.probe import protocol
from harness.probe.protocol import FLAG_ALL_NONE
from harness.record import Event, Recording, Run, where_of


def by_opt(run: Run) -> dict[tuple[int, int], Sequence[int]]:
    """(rank, optimizer) -> places of its rows in the rank's recording, hand-made steps left out."""
    present = [(rank, recording) for rank, recording in enumerate(run.ranks) if recording is not None]
    return {(rank, opt): places for rank, recording in present for opt, places in rows_of(recording).items()}


def rows_of(process: Recording) -> dict[int, Sequence[int]]:
    """Optimizer -> places of its rows in this process's recording: of a rank, or of a worker that the script made itself."""
    column = process.column("opt")
    kinds = set(column)
    if len(kinds) == 1:
        return {opt: range(len(column)) for opt in kinds - {protocol.OPT_BY_HAND}}
    return {opt: [i for i, o in enumerate(column) if o == opt] for opt in kinds - {protocol.OPT_BY_HAND}}


def backwards_so_far(recording: Recording) -> list[int]:
    """Backwards up to each row. Of several optimizers that step in turn only the first has the backward in its own row."""
    return list(itertools.accumulate(recording.column("num_backward")))


def ranks_of(rows: Mapping[tuple[int, int], Sequence[int]], opt: int) -> tuple[int, ...]:
    return tuple(sorted({rank for rank, o in rows if o == opt}))


def params_event(run: Run, rank: int, opt: int) -> Event | None:
    recording = run.ranks[rank]
    return params_of(recording, opt) if recording is not None else None


def params_of(process: Recording, opt: int) -> Event | None:
    return next((e for e in reversed(process.of(protocol.PARAMS)) if e["opt"] == opt), None)


def made_at(run: Run) -> Where | None:
    """Where the first optimizer was made."""
    return next((e.where for _, e in run.events(protocol.PARAMS) if e["opt"] != protocol.OPT_BY_HAND and e.where), None)


def step_site(run: Run, rank: int, opt: int) -> Where | None:
    """The backward before this optimizer's steps."""
    recording = run.ranks[rank]
    return accumulated_at(recording, opt) if recording is not None else None


def accumulated_at(process: Recording, opt: int) -> Where | None:
    return next((e.where for e in process.of("accumulation") if e["opt"] == opt and e.where), None)


def had_gradients(run: Run, rank: int, opt: int) -> bool:
    """Whether the optimizer's parameters had gradients right after a backward (they were cleared before the step then)."""
    recording = run.ranks[rank]
    return any(e["opt"] == opt and e["local"] for e in (recording.of("gradients") if recording else ()))


def orphaned(run: Run, rank: int, opt: int) -> list[str]:
    """Parameters that no module owns and that never had a gradient, in an optimizer whose other parameters are owned and have."""
    recording, event = run.ranks[rank], params_event(run, rank, opt)
    if recording is None or event is None:
        return []
    owned, names = event["owned"] or [], recording.param_names(opt)
    lost = {i for i, o in enumerate(owned) if not o}
    if not lost or len(lost) == len(owned):
        return []
    for key, (grads, _) in recording.details.items():
        if key[1] == opt:
            lost = {i for i in lost if i < len(grads) and grads[i] == 0}
    return [names[i] for i in sorted(lost) if i < len(names)]


@dataclass(frozen=True)
class Left:
    """An optimizer that was left behind: it steps on, and the loss has gone over to parameters that nobody holds."""

    step: int  # the first one that moved nothing new
    steps: int
    num: int  # parameters that receive the gradients
    names: list[str]
    made: Where | None


def left_behind(run: Run, rank: int, opt: int, steps: Sequence[int]) -> Left | None:
    """From some step to the end no gradient of the optimizer is new, and the loss reaches none of its parameters but others."""
    recording = run.ranks[rank]
    if recording is None or regime.sharded(run):
        return None
    looks = [e for e in recording.of("unstepped") if (e["opts"] or {}).get(str(opt)) == 0 and e["num"]]
    if not looks or not recording.of("unstepped")[-1]["num"]:
        return None
    tail, evidence = _nothing_new(recording, steps)
    late = [e for e in looks if tail < len(steps) and e.step >= recording.row(steps[tail]).step]
    if evidence < 3 or not late:
        return None
    named = [str(p["name"]) for p in late[-1]["params"] if p["name"]]
    return Left(recording.row(steps[tail]).step, len(steps) - tail, int(late[-1]["num"]), named, where_of(late[-1]["made"]))


def _nothing_new(recording: Recording, steps: Sequence[int]) -> tuple[int, int]:
    """(place in `steps` from which on no gradient is new, how many steps show it): all None, or the same bits for ever."""
    flags, stuck, evidence = recording.column("flags"), 0, 0
    for at in range(len(steps) - 1, -1, -1):
        grad = 0 if flags[steps[at]] & FLAG_ALL_NONE else recording.row(steps[at]).grad
        if grad and ((stuck and grad != stuck) or (evidence and not stuck)):
            return at + 1 + bool(stuck), evidence
        evidence += bool(flags[steps[at]] & FLAG_ALL_NONE) or bool(grad and stuck)
        stuck = stuck or grad
    return 0, evidence


def rebind_site(run: Run) -> Where | None:
    return next((e.where for _, e in run.events("wrap_changed") if e["what"] == "rebound"), None)


def lr_at(run: Run, steps: Sequence[int]) -> list[float]:
    """At one step of each rank."""
    found = []
    for recording, step in zip(run.present, steps, strict=True):
        index = recording.step_index.get(step)
        if index is not None:
            found.append(recording.row(index).lr)
    return found
