"""SYN120 train-flag-differs: a model is in train mode on some ranks and in eval mode on others

What it does
    Compares the training flags of all modules that own trained parameters, at every step.

Why it is bad
    Dropout and BatchNorm behave differently; parameters and losses stay plausible and equal, so nothing else shows it.

Wrong
    if rank == 1: model.eval()

Right
    model.train()                         # on every rank

Known limits
    Modes are compared at optimizer steps only. Ranks that hold other numbers of modules, all in train mode, are healthy.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Event, Run
from harness.steps import Step

MAX_TOLD = 64  # changes of modes that a process tells

class TrainFlagDiffers(Check):
    code = "SYN120"
    name = "train-flag-differs"
    severity = Severity.ERROR

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run)
        wrong = [s for s in run.steps() if s.complete and not s.same("train") and len(set(s.number("opt"))) == 1 and not _same_modes(run, s)]
        if len(wrong) < 2:
            return
        out = replicas.majority_out([r.train if r else 0 for r in wrong[0].rows])
        told = _modes_at(run, wrong[0].index)
        modes = [(rank, e) for rank, e in run.events("mode")]
        site = replicas.odd_site(modes, run.world_size)
        yield self.finding(
            f"the modules' train and eval flags differ between ranks at {len(wrong)} steps, the first is step {wrong[0].index}",
            where=site or facts.grad_site(wrong[0].number("opt")[0]),
            ranks=out or run.rank_ids,
            notes=[_named(told)] if told else [],
            help="restore the mode with model.train(was_training): `model.training = ...` sets the flag of the model alone, not those of its children"
            if told and _children_only(told)
            else "call model.train() and model.eval() on every rank alike",
        )


def _same_modes(run: Run, step: Step) -> bool:
    """Whether what differs is the number of modules alone: the ranks of a split model hold layers of their own, all of them in train mode."""
    told = [[e for e in r.of("train_flags") if e["opt"] == step.number("opt")[0]] for r in run.present]
    if any(len(r.of("train_flags")) >= MAX_TOLD for r in run.present):
        return False  # later changes were not told
    lasts = [next((e for e in reversed(events) if e.step <= step.index), None) for events in told]
    return all(e is not None and e["num_eval"] == 0 for e in lasts)


def _modes_at(run: Run, step: int) -> tuple[int, Event] | None:
    """(rank, its last told modes before that step's end), of the rank with most modules in eval mode."""
    told = [(rank, events[-1]) for rank in run.rank_ids if (r := run.ranks[rank]) and (events := [e for e in r.of("train_flags") if e.step <= step])]
    return max(told, key=lambda t: int(t[1]["num_eval"] or 0), default=None)


def _children_only(told: tuple[int, Event]) -> bool:
    return bool(told[1]["num_eval"]) and all(told[1]["tops"] or (False,))


def _named(told: tuple[int, Event]) -> str:
    names = [str(n).removeprefix("module.") or "the model itself" for n in told[1]["eval"] or ()]
    return f"in eval mode on rank {told[0]}: {replicas.listed(names, 6)}" + (
        "; the model's own flag says training" if _children_only(told) else ""
    )
