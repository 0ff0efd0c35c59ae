"""SYN114 trainable-outside-ddp: trained parameters that no DDP owns

What it does
    Looks for parameters of an optimizer that belong to no DDP object, in a job whose other parameters do, and whose gradients or
    values differ between ranks.

Why it is bad
    A loss head, a temperature, an embedding beside the wrapped model is trained on each rank's own gradient and drifts apart.

Wrong
    model = DDP(backbone)
    opt = SGD([*model.parameters(), *head.parameters()])

Right
    model = DDP(nn.Sequential(backbone, head))

Known limits
    Parameters whose gradients are averaged by hand are equal at the step: silent. So are those whose values the script all-reduces itself, where they
    lie, again and again: local steps with an average behind them, as of parameters that DDP was told to ignore. An average of a copy is not
    seen. So are those that one rank owns (tables or experts of a model that is
    split over the ranks): no other rank has a parameter of their name, their part of the model has other shapes on another rank, or rows travel by
    all_to_all, or by messages or an all_gather that the script's own backward sends (or torch.distributed.nn's), and the ranks' parameters differ from
    the start, where those that DDP wraps do not: where all differ, by the seed, a gather in the backward makes it advice. So is a phase
    without DDP in which each rank trains a model of its own with hyper-parameters of its own, or on the same batches, where what is wrapped afterwards
    is equal on all ranks. Where that is so and no sampler shares data out in the phase, it is advice: folds, or an ensemble, by rank look like a
    forgotten wrap. It is advice too where the optimizer of what lies beside DDP has hyper-parameters of each rank's own from its first step on, and other
    parameters from the start, and no sampler shares data out: a head that each client keeps to itself. Where such an optimizer holds a parameter of
    another shape on another rank (an embedding and a head for each language), and no sampler shares data out, nothing of it could be averaged: silent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from harness.checks import regime
from harness.checks.base import Check
from harness.checks.syn import members, replicas
from harness.model import Finding, Severity
from harness.record import Event, Run

ROUNDS = 3  # made equal once or twice, they part again


class TrainableOutsideDdp(Check):
    code = "SYN114"
    name = "trainable-outside-ddp"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT111", "SYN126", "OPT114")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run, ddp=True)
        for opt, parting in sorted(facts.partings.items()):
            event = facts.params_event(opt, step=parting.grad_step if parting.grad_step is not None else parting.param_step)
            if event is None:
                continue
            outside = [n for n, w in zip(event["names"] or (), event["ddp"] or (), strict=False) if w == -1]
            parted = set(parting.grad_names) | set(parting.param_names)
            unlike = _of_other_shapes(run, opt, event.step)
            wrong = [n for n in outside if n in parted and _part(n) not in unlike]
            owned = bool(wrong) and _owned(run, opt)
            if wrong and ((owned and _on_purpose(run)) or _averaged(run, event, wrong)):
                continue
            if wrong and (members.phase_of_own(run, facts, parting) or members.of_own_shapes(run, facts, parting)):
                continue
            if wrong and (parting.num_grad or parting.num_param):
                yield self.finding(
                    f"{len(wrong)} trained parameters belong to no DDP object and differ between ranks: {replicas.listed(wrong)}",
                    where=event.where,
                    ranks=run.rank_ids,
                    severity=Severity.ADVICE if owned or members.agreed_after(run, facts, parting) or members.personal(run, facts, parting) else None,
                    notes=[f"first at step {parting.grad_step if parting.grad_step is not None else parting.param_step}"],
                    help="wrap one module that holds all trained parameters, or wrap this part in a DDP of its own",
                )
                return


def _averaged(run: Run, event: Event, wrong: list[str]) -> bool:
    """Whether the script itself reduces the values of all of them, where they lie, in rounds, on every rank."""
    numels = dict(zip(event["names"] or (), event["numels"] or (), strict=False))
    sizes = Counter(numels[n] for n in wrong)
    reduced = [Counter(e["numel"] for e in r.of("coll") if e["beside"]) for r in run.present]
    return all(one[size] >= ROUNDS * num for one in reduced for size, num in sizes.items())


def _owned(run: Run, opt: int) -> bool:
    """Whether the ranks serve each other with parameters of their own."""
    home = regime.by_rows(run) or regime.by_backward(run) or (regime.by_library(run) and _wrapped_alike(run))
    return home and not replicas.starts_equal(run, opt)


def _on_purpose(run: Run) -> bool:
    """A gather in the backward alone may be that of a loss, behind a head that all ranks should have."""
    return regime.by_rows(run) or regime.by_messages(run) or _wrapped_alike(run)


def _wrapped_alike(run: Run) -> bool:
    """Whether the ranks had one seed where what DDP wraps was made: parameters that differ all the same were made so on purpose."""
    first = [next((e for e in r.of("wrapping")), None) for r in run.present]
    return len({repr(e["each"]) if e is not None else "" for e in first}) == 1 and None not in first


def _of_other_shapes(run: Run, opt: int, step: int) -> set[str]:
    """Parts of the model that hold a parameter of another shape on another rank: nothing of theirs could be averaged."""
    events = [e for r in run.present if (e := r.params_at(opt, step)) is not None]
    tables = [{str(n): repr(s) for n, s in zip(e["names"] or (), e["shapes"] or (), strict=False)} for e in events]
    return {_part(n) for n in tables[0] if any(n in t and t[n] != tables[0][n] for t in tables[1:])} if tables else set()


def _part(name: str) -> str:
    return name.partition(".")[0]
