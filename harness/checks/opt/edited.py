"""OPT111 parameters-edited-on-one-rank: parameters changed on one rank outside the optimizer

What it does
    Looks for replicas whose gradients and hyper-parameters agree at every step so far and whose parameters differ. Where some ranks put a state
    dict back into the model at that step and others did not, or copied other values into parameters (`copy_`, `p.data = ...`: weights of an average
    that are put in for a preview and stay), that is said, and where.

Why it is bad
    An in-place edit under `if rank == ...`, a bad copy or a flipped bit: from there on that rank trains another model, while its
    gradients stay averaged.

Wrong
    if rank == 1: model.fc.weight.data[3, 3] += 0.01
    if rank == 0: ema.copy_to(model.parameters()); preview(model)     # and no ema.restore(...)

Right
    with torch.no_grad(): model.fc.weight[3, 3] += 0.01   # on every rank

Known limits
    Large models are hashed in slices: an edit of one element can be seen some steps late. The optimizer's own state may be the
    cause too (CKP106). The line is that of a copy or an assignment of `.data`; other in-place arithmetic (`weight.data[3, 3] += ...`) calls
    nothing that is watched, and the finding stands on the backward. Updates written by hand, without an
    optimizer, are not judged here: their gradients are not read.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.lau import blame
from harness.checks.syn import callers, replicas, rounding
from harness.model import Finding, Severity, Where
from harness.probe import protocol
from harness.record import Event, Run, where_of


class EditedOnOneRank(Check):
    code = "OPT111"
    name = "parameters-edited-on-one-rank"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT114")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run)
        for opt, parting in sorted(facts.partings.items()):
            if opt == protocol.OPT_BY_HAND:  # what it steps with is not read: nobody knows whether it agrees
                continue
            first = min((s for s in (parting.param_step, parting.full_step) if s is not None), default=None)
            if first is None or not replicas.starts_equal(run, opt) or not (facts.ddp_names(opt) or facts.hand_synced_numel):
                continue
            if any(s is not None and s <= first for s in (parting.grad_step, parting.hyper_step)):
                continue
            rounding.require_more(run, parting)
            names = parting.param_names or replicas.final_names(run)
            if (put_back := _put_back(run, first)) is not None:
                yield self._loaded(run, first, *put_back)
                return
            if (written := _overwritten(run, first)) is not None:
                yield self._written(run, first, *written)
                return
            yield self.finding(
                f"parameters differ from step {first} on although gradients and hyper-parameters agree: "
                f"{replicas.listed(names) if names else 'see notes'}",
                where=facts.grad_site(opt, first),
                ranks=run.rank_ids,
                notes=[f"first seen after step {first} of {parting.steps}"],
                help=(
                    "find what writes to these parameters on some ranks only (an edit, a copy, an optimizer state that "
                    "was loaded on one rank)"
                ),
            )
            return

    def _loaded(self, run: Run, first: int, ranks: list[int], where: Where) -> Finding:
        return self.finding(
            f"{blame.plural(ranks)} put{'s' if len(ranks) == 1 else ''} a state dict back into the model at step {first}, and the others do not: from there on "
            "the ranks train different models",
            where=where,
            ranks=ranks,
            notes=[f"gradients and hyper-parameters agree; the parameters differ first after step {first}"],
            help="decide on a number that all ranks share: all_reduce the loss that is compared, or broadcast the decision of rank 0",
        )


    def _written(self, run: Run, first: int, ranks: list[int], event: Event) -> Finding:
        where = where_of(event["guard"]) or callers.by_trainer(run, event) or event.where
        return self.finding(
            f"{blame.plural(ranks)} write{'s' if len(ranks) == 1 else ''} other values into the model's parameters before step {first} and "
            f"train{'s' if len(ranks) == 1 else ''} on with them, and the others do not: from there on the parameters differ",
            where=where,
            ranks=ranks,
            notes=[
                f"gradients and hyper-parameters agree; the parameters differ first after step {first}",
                *([f"the last such write is at {event.where.place}: `{event.where.text}`"] if event.where is not None and event.where != where else []),
            ],
            help="put the trained weights back before the next step (keep a copy, swap, preview, restore), preview with a copy of the model, or do it on every rank",
        )


def _put_back(run: Run, first: int) -> tuple[list[int], Where] | None:
    """(ranks that loaded a state dict right before that step, the statement); None where none did, or all."""
    found = {
        rank: e.where
        for rank, r in enumerate(run.ranks)
        if r is not None
        for e in r.of("load_state")
        if not e["error"] and first - 1 <= e.step <= first and e.step and e.where is not None
    }
    ranks = sorted(found)
    where = found[ranks[0]] if ranks else None
    return (ranks, where) if where is not None and len(ranks) < len(run.present) else None


def _overwritten(run: Run, first: int) -> tuple[list[int], Event] | None:
    """(ranks that copied into their parameters before that step, the last time that they did), by statements that other ranks did not come to."""
    since = next((s for s in range(first - 1, -1, -1) if protocol.witnessed(s)), -1)
    data = [(rank, e) for rank, e in run.events("wrap_moved") if e["data"] and e.where is not None and ".data" in e.where.text]
    told = [(rank, e) for rank, e in (*run.events("overwrite"), *data) if since < e.step <= first and e.where is not None]
    by_line: dict[tuple[str, int], set[int]] = {}
    for rank, e in told:
        by_line.setdefault((e.where.file, e.where.line) if e.where else ("", 0), set()).add(rank)
    lone = [(rank, e) for rank, e in told if e.where and len(by_line[(e.where.file, e.where.line)]) < len(run.present)]
    last = max(lone, key=lambda one: one[1].t_ns, default=None)
    if last is None or last[1].where is None:
        return None
    return sorted(by_line[(last[1].where.file, last[1].where.line)]), last[1]
