"""Ranks that train models of their own on purpose: members of an ensemble, of a population, points of a search."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

from harness.checks.syn import folds, replicas
from harness.checks.syn.replicas import Parting, Replicas
from harness.probe import protocol
from harness.record import Recording, Run, texts
from harness.steps import Step

LOOKED_AT = 64  # steps
MOST = 0.9


def on_purpose(run: Run, opt: int) -> bool:
    """Whether the ranks look like members of an ensemble or points of a search: no data shared out by a sampler, and what makes them differ is
    their seeds, their hyper-parameters, or their models while all draw the same batches; or folds: what one holds out, the others train on."""
    whole = [(0, run.num_steps)] * len(run.present)
    return not _shared_out(run, whole) and (_own_seeds(run, opt) or _own_hyper(run, opt) or _same_batches(run, opt) or folds.by_rank(run))


def dealt_out(run: Run) -> bool:
    """Whether the ranks came to their end with other numbers of optimizers, one apart, which one statement made: five folds over two ranks. A training whose
    wrap was forgotten has as many on each."""
    told = [[e for e in r.of(protocol.PARAMS) if e["opt"] != protocol.OPT_BY_HAND] for r in run.present]
    nums = [len({e["opt"] for e in events}) for events in told]
    made = {e.where for events in told for e in events}
    return run.finished and max(nums) - min(nums) == 1 and min(nums) > 0 and len(made) == 1 and None not in made


def _shared_out(run: Run, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether a loop over a loader with a distributed sampler begins in spans of steps, a rank each."""
    return any(
        isinstance(e["distributed"], dict) and first <= e.step <= last
        for recording, (first, last) in zip(run.present, spans, strict=True)
        for e in recording.of("loader")
    )


def share_nothing(run: Run, facts: Replicas, parting: Parting) -> bool:
    """Whether an optimizer takes its steps in a phase without any of DDP's, on parameters that DDP never wraps, and its gradients differ."""
    differ = parting.steps > 0 and parting.num_grad >= MOST * parting.steps
    return differ and not facts.ddp_names(parting.opt) and _spans(run, parting.opt) is not None


def beside(facts: Replicas, parting: Parting) -> bool:
    """Whether an optimizer has only parameters that DDP never wraps, in a job with DDP, and its gradients differ: its updates part by them anyway."""
    return facts.wrapped and not facts.ddp_names(parting.opt) and parting.steps > 0 and parting.num_grad >= MOST * parting.steps


def personal(run: Run, facts: Replicas, parting: Parting) -> bool:
    """Whether such an optimizer steps while DDP reduces, has hyper-parameters of each rank's own, and its parameters other values from the start, and no
    sampler shares data out: a head for each client."""
    opt, whole = parting.opt, [(0, run.num_steps)] * len(run.present)
    apart = beside(facts, parting) and _spans(run, opt) is None and not _shared_out(run, whole)
    return apart and _own_hyper(run, opt) and not replicas.starts_equal(run, opt)


def of_own_shapes(run: Run, facts: Replicas, parting: Parting) -> bool:
    """Whether such an optimizer holds a parameter of another shape on another rank, and no sampler shares data out: what it steps could be neither averaged nor
    wrapped as one; a vocabulary and a head for each language."""
    if not beside(facts, parting) or _shared_out(run, [(0, run.num_steps)] * len(run.present)):
        return False
    told = [e for r in run.present if (e := r.params_at(parting.opt)) is not None]
    names = [texts(e["names"]) for e in told]
    return len(told) == len(run.present) and len({repr(n) for n in names}) == 1 and len({repr(e["shapes"]) for e in told}) > 1


def phase_of_own(run: Run, facts: Replicas, parting: Parting) -> bool:
    """Whether such a phase is a search, before or after the ranks train together: own hyper-parameters or shapes, or other models on the same batches. A model
    that DDP wraps afterwards has then been handed to all ranks; one that each has warmed up alone, because the wrap came too late, differs there."""
    opt = parting.opt
    spans = _spans(run, opt) if share_nothing(run, facts, parting) else None
    if spans is None or _shared_out(run, spans) or len(_wrapped_after(run, spans)) > 1:
        return False
    return _own_hyper(run, opt) or _own_shapes(run, opt, spans) or (_same_batches(run, opt) and not replicas.starts_equal(run, opt))


def agreed_after(run: Run, facts: Replicas, parting: Parting) -> bool:
    """Whether such a phase has no data shared out by a sampler, and all ranks wrap one model after it: folds, an ensemble of teachers may be meant."""
    spans = _spans(run, parting.opt) if share_nothing(run, facts, parting) else None
    return spans is not None and not _shared_out(run, spans) and len(after := _wrapped_after(run, spans)) == 1 and "" not in after


def steps_alone(run: Run, steps: Collection[int]) -> bool:
    """Whether all of these steps lie in such phases."""
    found = run.__dict__.get("_alone")
    if not isinstance(found, set):
        facts = replicas.of(run)
        found = run.__dict__["_alone"] = {opt for opt, p in facts.partings.items() if phase_of_own(run, facts, p)}
    recording = run.present[0]
    at, opts = recording.step_index, recording.column("opt")
    return bool(found) and bool(steps) and all(s in at and opts[at[s]] in found for s in steps)


def apart(run: Run, steps: Collection[int]) -> bool:
    """Whether all of these steps that left a row are of optimizers that share nothing: no gradient, nor parameters now and then."""
    found = run.__dict__.get("_apart")
    if not isinstance(found, set):
        facts = replicas.of(run)
        found = run.__dict__["_apart"] = {o for o, p in facts.partings.items() if share_nothing(run, facts, p) and replicas.agreements(run, o) < 2}
    recording = run.present[0]
    at, opts = recording.step_index, recording.column("opt")
    told = [opts[at[s]] for s in steps if s in at] if found else []
    return bool(told) and found.issuperset(told)


def _spans(run: Run, opt: int) -> list[tuple[int, int]] | None:
    """A rank each, the first and the last step of an optimizer; None where DDP's reducer is at work between them."""
    found = [_span(r, opt) for r in run.present]
    spans = [s for s in found if s is not None]
    return spans if len(spans) == len(found) else None


def _span(recording: Recording, opt: int) -> tuple[int, int] | None:
    opts, steps = recording.column("opt"), recording.column("step")
    at = [i for i, o in enumerate(opts) if o == opt]
    if not at:
        return None
    flags, reduced = recording.column("flags"), recording.column("num_reduce")
    if any(flags[i] & protocol.FLAG_DDP or reduced[i] for i in range(at[0], at[-1] + 1)):
        return None
    return steps[at[0]], steps[at[-1]]


def _wrapped_after(run: Run, spans: Sequence[tuple[int, int]]) -> set[str]:
    """What the ranks wrap next after a phase, before DDP's own broadcast; "" of one that wraps nothing more."""
    wrapped = [next((e for e in r.of("wrapping") if e.step > last), None) for r, (_, last) in zip(run.present, spans, strict=True)]
    return {repr(e["each"]) if e is not None else "" for e in wrapped}


def _own_seeds(run: Run, opt: int) -> bool:
    starts = replicas.initial(run, opt)
    seeds = [tuple(e["value"] for e in r.of("seed") if e["what"] == "torch" and e.step == 0) for r in run.present]
    return 1 < len(run.present) == len(set(starts)) == len(set(seeds))


def _own_hyper(run: Run, opt: int) -> bool:
    """From its first step on; later on a population may copy those of its best member."""
    steps = _steps_of(run, opt)
    return bool(steps) and not steps[0].same("hyper")


def _own_shapes(run: Run, opt: int, spans: Sequence[tuple[int, int]]) -> bool:
    """All ranks' parameters are of other shapes: students of several widths."""
    told = [r.params_at(opt, first) for r, (first, _) in zip(run.present, spans, strict=True)]
    return len({repr(e["shapes"]) if e is not None else "" for e in told}) == len(told) and None not in told


def _same_batches(run: Run, opt: int) -> bool:
    """Of loaders, at every step; a digest is 0 where nothing was seen of them."""
    steps = _steps_of(run, opt)
    return bool(steps) and all(s.same("batch") and s.taken("batch") for s in steps)


def _steps_of(run: Run, opt: int) -> list[Step]:
    """The first steps of an optimizer that all ranks took."""
    return list(islice((s for s in run.steps() if s.complete and set(s.number("opt")) == {opt}), LOOKED_AT))
