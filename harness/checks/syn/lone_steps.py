"""Optimizer steps on gradients that stayed local inside no_sync(), and which of them part the replicas; those without digests too."""

from __future__ import annotations

from dataclasses import dataclass

from harness.checks.syn import replicas
from harness.probe.protocol import FLAG_DDP, FLAG_NO_SYNC, FLAG_SKIPPED
from harness.record import Run
from harness.steps import Step


def _is_lone(step: Step) -> bool:
    """The last backward of every rank before this step ran inside no_sync(), and the step was taken."""
    return step.complete and all(f & FLAG_NO_SYNC and f & FLAG_DDP and not f & FLAG_SKIPPED for f in step.number("flags"))


def apart(run: Run) -> tuple[list[Step], bool]:
    """Those whose gradients differ between ranks; whether the script brings the parameters together again after every one of them."""
    lone: list[Step] = []
    waiting: set[int] = set()  # optimizers whose last step was such a one
    mended: list[bool] = []
    for step in run.steps():
        if _is_lone(step) and not step.same("grad"):
            lone.append(step)
            waiting.update(step.number("opt"))
        elif waiting and step.complete and step.taken("param") and waiting & (opts := set(step.number("opt"))):
            waiting -= opts
            mended.append(step.same("param") and step.same("grad"))
    return lone, bool(mended) and all(mended)


@dataclass(frozen=True)
class Between:
    """Steps of one kind between two with digests, of which the first finds the replicas equal and the second apart."""

    opt: int
    equal: int
    parted: int
    lone: list[int]  # all of the run
    first: int


def between(run: Run, facts: replicas.Replicas) -> Between | None:
    """From the 256th step on few carry digests: where the gradients of those that do agree, and the parameters part all the same, a step between them did
    it. None where the script reduces gradients by hand, at a backward inside no_sync() too."""
    if not facts.same_opts or any(e["grad"] and e.step >= 1 for _, e in run.events("coll")):
        return None
    for opt, parting in sorted(facts.partings.items()):
        parted = min((s for s in (parting.param_step, parting.full_step) if s is not None), default=None)
        if parted is None or any(s is not None and s <= parted for s in (parting.grad_step, parting.hyper_step)):
            continue
        steps = [s for s in run.steps() if s.complete and set(s.number("opt")) == {opt}]
        equal = max((s.index for s in steps if s.index < parted and s.taken("param")), default=None)
        lone = _lone(run, steps, opt)
        inside = [s for s in lone if equal is not None and equal < s < parted]
        if equal is not None and inside and not any(s < equal for s in lone) and 2 * len(inside) < parted - equal:
            return Between(opt, equal, parted, lone, inside[0])
    return None


def _lone(run: Run, steps: list[Step], opt: int) -> list[int]:
    """Numbers of the steps that leave a row, and of those in the dark."""
    dark = [{e.step for e in r.of("lone_step") if e["opt"] == opt} for r in run.present]
    return sorted({s.index for s in steps if _is_lone(s)} | set.intersection(*dark))
