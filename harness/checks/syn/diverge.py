"""SYN127 replicas-diverge: replicas differ and no known cause was found

What it does
    The last resort: parameters that should be identical (in DDP, or equal at the start with equal gradients at first) differ
    after a step. Says so where optimizers step in hooks inside of the backward, before DDP has averaged; where nobody averages the gradients
    from some step on; and where they are equal after the backward and other ones at the step (each rank scales them by a number of its own).
    Of ranks that hold shares of one layer (tensor parallelism by DTensor) it compares the copies that they hold of its other parameters.

Why it is bad
    From there on every rank trains another model.

Wrong
    (many)

Right
    (compare the first differing parameter and step in the notes with what the script does there)

Known limits
    Parameters that are averaged from time to time by design (LocalSGD) are not judged.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import mesh_copies
from harness.checks.syn import callers, gradients, in_hooks, lone_steps, replicas, rounding
from harness.model import Finding, Severity, Where
from harness.probe import protocol
from harness.record import Event, Run, where_of

BY_HAND = "updated by hand, from gradients that are not read"


class ReplicasDiverge(Check):
    code = "SYN127"
    name = "replicas-diverge"
    severity = Severity.ERROR
    explains = ("OPT114",)

    def end(self, run: Run) -> Iterable[Finding]:
        if (parted := mesh_copies.parted(run)) is not None:
            yield self._in_one_team(run, *parted)
            return
        facts = replicas.require(run)
        if any(True for _ in run.events("join")):
            raise NotApplicable("Join is in use: ranks may take different numbers of steps")
        for opt, parting in sorted(facts.partings.items()):
            names = [n for n in (parting.grad_names or parting.param_names) if not facts.wrapped or n in facts.ddp_names(opt)]
            hand = (
                not facts.wrapped and facts.hand_synced_numel and replicas.starts_equal(run, opt) and parting.num_grad <= parting.steps // 2
            )
            if parting.num_param and names and (facts.wrapped or hand) and facts.same_opts:
                rounding.require_more(run, parting)
                lone, mended = lone_steps.apart(run)
                if mended and parting.num_param <= len(lone):
                    return  # local steps on purpose, each followed by an average of the parameters
                read = f"{parting.num_grad} of {parting.steps} steps with differing gradients" if opt != protocol.OPT_BY_HAND else BY_HAND
                seen = f"{read}, {parting.num_param} with differing parameters"
                if facts.wrapped and (updates := in_hooks.updates(run)):
                    yield self._in_backward(run, updates, seen)
                    return
                start = replicas.unaveraged(facts, opt) if facts.wrapped and parting.num_grad else None
                if start is not None:
                    yield self._unaveraged(run, facts, parting, start, seen)
                elif parting.grad_step is not None and (changed := gradients.changed_apart(run, opt)):
                    yield self._changed(run, parting, changed, [f"for example {replicas.listed(names)}", seen])
                else:
                    yield self._unknown(run, facts, parting, names, seen)
                return

    def _in_one_team(self, run: Run, left: int, right: int, name: str) -> Finding:
        drawn = _drawn_apart(run, (left, right))
        return self.finding(
            f"ranks {left} and {right} hold shares of one layer, and their copies of its other parameters part",
            where=drawn or replicas.first_where(run, "params"),
            ranks=(left, right),
            notes=[
                f"`{name}` was the same on both before the first step and is another one on each of them after eight",
                *([f"the two ranks draw other values at {drawn.place}"] if drawn is not None else []),
            ],
            help="the ranks of a tensor-parallel group compute one output together: give them the same batch and the same random numbers"
            + (": a seed of the data-parallel rank" if drawn is not None else ", and all-reduce the gradients of what they hold copies of"),
            severity=None if drawn is not None else Severity.ADVICE,  # experts of its own that a rank has beside, equal at the start, part as well
        )

    def _unknown(self, run: Run, facts: replicas.Replicas, parting: replicas.Parting, names: list[str], seen: str) -> Finding:
        what = "gradients" if parting.grad_step is not None else "parameters"
        return self.finding(
            f"replicas part at step {parting.grad_step if parting.grad_step is not None else parting.param_step}: "
            f"{what} of {replicas.listed(names)} differ",
            where=facts.grad_site(parting.opt, parting.grad_step),
            ranks=run.rank_ids,
            notes=[seen],
            help=(
                "update them from what the ranks have averaged: see that the reduced values are those that the update takes"
                if seen.startswith(BY_HAND)
                else "see what the script does to these parameters at that step on one rank only"
            ),
        )

    def _unaveraged(self, run: Run, facts: replicas.Replicas, parting: replicas.Parting, start: int, seen: str) -> Finding:
        since = "in any step" if not facts.num_reduce else f"from step {start} on"
        return self.finding(
            f"no gradient is averaged {since}: DDP's reducer issues no all-reduce, and the script none that could carry the gradients",
            where=facts.grad_site(parting.opt, start),
            ranks=run.rank_ids,
            notes=[f"{facts.num_reduce} of {facts.num_ddp_steps} steps with an all-reduce of DDP's, the last {facts.num_silent} without one", seen],
            help="find what keeps DDP out on every rank alike: a forward around it, no_sync(), gradients written by hand, parameters whose `.data` "
            "was given another type",
        )

    def _in_backward(self, run: Run, updates: list[Event], seen: str) -> Finding:
        first = updates[0]
        stepped = where_of(first["stepped"])
        return self.finding(
            f"{'the optimizer steps' if first['how'] == 'step' else 'parameters are updated'} inside the backward, in hooks on the parameters: before DDP's "
            "all-reduce, with the rank's own gradient",
            where=callers.by_trainer(run, first) or first.where,
            ranks=run.rank_ids,
            notes=[
                f"{first['name']} was another one when its post-accumulate hook returned"
                + (f", which was registered at {first.where.place}" if first.where is not None else "")
                + (f" and steps at {stepped.place}" if stepped is not None else ""),
                seen,
            ],
            help="step when backward() has returned: DDP's reducer is only told of a gradient behind its hooks; without DDP, average in the hook before the step",
        )

    def _changed(self, run: Run, parting: replicas.Parting, factors: tuple[float | None, ...], notes: list[str]) -> Finding:
        site = next((e.where for _, e in run.events("grad_written") if e["opt"] == parting.opt and e["backward"] and e.where is not None), None)
        known = [f for f in factors if f is not None]
        if len(known) == len(factors):
            notes = [f"multiplied by {', '.join(f'{f:.4g} on rank {r}' for r, f in zip(run.rank_ids, known, strict=False))}", *notes]
        return self.finding(
            "gradients are equal on all ranks after the backward and differ at the step: the script changes them in between, on each rank "
            + ("by a factor of its own" if len(known) == len(factors) else "in another way"),
            where=site,
            ranks=run.rank_ids,
            notes=notes,
            help="what is done to averaged gradients must be the same on every rank: take the factor (a loss scale, a norm, a count) from a value "
            "that all ranks share, e.g. all-reduce it first",
        )


def _drawn_apart(run: Run, ranks: tuple[int, int]) -> Where | None:
    """The first statement whose draws differ between the two ranks."""
    one, other = ({(e.where, e["at"]): e for e in r.of("draw")} if (r := run.ranks[rank]) is not None else {} for rank in ranks)
    return next((where for (where, at), e in one.items() if (where, at) in other and other[where, at]["digest"] != e["digest"]), None)
