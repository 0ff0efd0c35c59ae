"""SYN130 sync-has-no-effect: gradients or parameters are reduced by hand, but the result is not written back, or is changed behind it

What it does
    In a job without DDP whose collectives carry exactly the model's gradients or parameters, asks whether gradients at the step,
    or parameters before it, ever agree between ranks. Where they agree within sub-groups of the ranks only, the reduction ran over
    those. Under DDP the same is asked of models that all start equal and are wrapped over groups of the ranks (`process_group=`).
    Gradients that agree up to some step, and from there on never again although the reductions go on, were lost on the way: tensors that are kept
    from one step to the next are nobody's gradients any more once `zero_grad()` has set those to None.

Why it is bad
    The all_reduce costs its time and changes nothing: every rank goes on with its own gradient, and the replicas part.

Wrong
    for grad, synced in zip(grads, unflatten(flat, grads)):
        grad = synced                     # binds a name, writes nothing

Right
    for grad, synced in zip(grads, unflatten(flat, grads)):
        grad.copy_(synced)

Known limits
    Averaging parameters from time to time (LocalSGD) is healthy and silent: parameters agree afterwards. So are ranks that part at some step, reduce
    gradients of their own for a log, and average their parameters behind the last step (SWAP); where they do not average, or what goes in was not read
    (on a device), gradients that part at some step are a warning: an error needs that all ranks go on putting in the same, reduced before.
    A flat tensor may hold a few numbers beside the gradients (a count, a loss), and buckets may carry them in parts, between the backward and the
    step. Where the gradients are no backward's (`torch.func`), or others at the step than behind it (by more than a factor), on every rank, the
    reduced values are taken to be written and changed afterwards: by one factor, where what the ranks' steps take are multiples of each other, else
    by noise or the like. Where the script also writes the parameters between the steps, this is a warning, and advice where the reduction comes after
    the step: elastic averaging (EASGD) keeps the ranks apart and reduces what moves their centre.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks import regime
from harness.checks.base import Check, NotApplicable
from harness.checks.syn import from_step, gradients, replicas
from harness.model import Finding, Severity, Where
from harness.record import Event, Run, number, where_of

BESIDE = 16  # numbers that a flat tensor may hold beside the gradients, and no more than an eighth of them


class SyncHasNoEffect(Check):
    code = "SYN130"
    name = "sync-has-no-effect"
    severity = Severity.ERROR
    explains = ("SYN126", "SYN127", "SYN128", "OPT111")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run, together_first=True)
        if facts.wrapped:
            yield from self._wrapped_over_a_part(run, facts)
            return
        for opt, parting in sorted(facts.partings.items()):
            event = facts.params_event(opt)
            numels = [n for n in (event["numels"] if event else None) or () if isinstance(n, int)]
            start = from_step.parted(run, opt, parting)
            if start is None or parting.steps < 2:
                continue
            beside = min(BESIDE, sum(numels) // 8)
            whole = [e for e in replicas.carrying(run, numels, beside) if not start or (e.step >= start and e["graded"])]
            carrying = whole or [e for e in from_step.in_parcels(run, event, beside) if e.step >= start]
            if not carrying or not _at_most_steps(run, opt, {e.step for e in carrying}, start):
                continue  # averaged now and then, or once at the end
            if not replicas.starts_equal(run, opt) or replicas.agreements(run, opt, start) or (not start and gradients.ever_agree(run)):
                continue
            groups = _agreeing_ranks(parting)
            if 1 < len(groups) < run.world_size and carrying[0]["world"] is False:
                yield self._over_a_part(run, carrying[0], groups)
                return
            seen = f"gradients and parameters differ at all of {parting.steps} steps, although {len(carrying)} collectives on rank 0 carried {sum(numels)} elements"
            if regime.writes_parameters(run, opt):
                yield self._beside_writes(run, carrying[0], seen, spent=bool(whole) and _behind_the_step(run, carrying, numels))
            elif start:
                stale = from_step.stale(run, carrying)
                if not stale and from_step.averaged_at_the_end(run, numels):
                    continue
                yield self._from_step(run, carrying[0], parting, start, kept=from_step.left_alone(run, opt, start), stale=stale)
            elif factors := gradients.own_factors(run, opt):
                yield self._own_factor(run, carrying[0], seen, factors)
            elif early := _too_early(run, [e for e in carrying if not whole or number(e["numel"]) >= sum(numels) or e["numel"] in numels]):
                yield self._before_the_last(run, *early, facts.grad_site(opt), seen)
            else:
                yield self._in_vain(run, carrying[0], seen, written=gradients.made_by_hand(run, opt))
            return

    def _from_step(self, run: Run, call: Event, parting: replicas.Parting, start: int, *, kept: bool, stale: bool) -> Finding:
        return self.finding(
            f"the ranks' gradients agree up to step {start - 1} and at none of the {parting.num_grad} steps behind it, although {call['op']} goes on carrying "
            f"as many numbers: what is reduced {'are no longer the gradients that step() takes' if stale else 'does not come back into them'}",
            where=call.where,
            ranks=run.rank_ids,
            severity=None if stale else Severity.WARNING,
            notes=[
                *(["what goes in is the same on all ranks: it was reduced before"] if stale else []),
                *(["since then each rank's gradient at the step is its own, as the backward left it"] if kept else []),
                f"parameters differ after {parting.num_param} of {parting.steps} steps",
            ],
            help="read `p.grad` anew behind every backward(): tensors, or views of a flat buffer, that were collected before are nobody's gradients once "
            "zero_grad() has set those to None, or keep them: `zero_grad(set_to_none=False)`",
        )

    def _beside_writes(self, run: Run, call: Event, seen: str, *, spent: bool) -> Finding:
        """`spent`: the gradients were used up by the time of the reduction."""
        return self.finding(
            f"{call['op']} carries as many numbers as the model has, and neither gradients nor parameters agree between ranks at the step; the script writes "
            "the parameters between the steps",
            where=call.where,
            ranks=run.rank_ids,
            notes=[seen],
            help="healthy where the ranks are meant to stay apart and are only pulled to a common centre (elastic averaging): score and save the centre. "
            "Where they are replicas, copy the reduced values back in place before step()",
            severity=Severity.ADVICE if spent else Severity.WARNING,
        )

    def _own_factor(self, run: Run, call: Event, seen: str, factors: Sequence[tuple[float, ...]]) -> Finding:
        site = _told(run, call)
        divided = where_of(site["divided"]) if site is not None else None
        last = max(range(1, len(factors[0])), key=lambda rank: max(abs(each[rank] - 1) for each in factors))
        times = ", ".join(f"{each[last]:.3g}" for each in factors[:6])
        return self.finding(
            f"{call['op']} carries the model's gradients, but each rank then scales the result by a number of its own: at the step they differ between ranks "
            "by one factor",
            where=divided or call.where,
            ranks=run.rank_ids,
            notes=[
                *([f"reduced at {call.where.place}"] if divided is not None and call.where is not None else []),
                f"rank {last}'s gradients are those of rank 0 times {times} at the first steps",
                seen,
            ],
            help="divide by what is the same on all ranks: the number of ranks, or a count (of tokens, of samples) that was reduced too",
        )

    def _before_the_last(self, run: Run, call: Event, before: int, total: int, backward: Where | None, seen: str) -> Finding:
        site = _told(run, call)
        callers = [w for s in (site["callers"] or () if site is not None else ()) if (w := where_of(s)) is not None]
        beside = [w for w in (call.where, *callers) if w is not None and backward is not None and (w.file, w.function) == (backward.file, backward.function)]
        here = beside[0] if beside else call.where
        later = "the last one adds stays" if total - before == 1 else f"the last {total - before} add stays"
        return self.finding(
            f"the gradients are reduced after {before} of a step's {total} backwards: what {later} each rank's own",
            where=here,
            ranks=run.rank_ids,
            notes=[
                *([f"{call['op']} is at {call.where.place}"] if here is not call.where and call.where is not None else []),
                *([f"the backward is at {backward.place}"] if backward is not None else []),
                seen,
            ],
            help="reduce behind the last `backward()` of a step, before the clip and step()",
        )

    def _in_vain(self, run: Run, call: Event, seen: str, *, written: bool) -> Finding:
        why, way = (
            (
                "each rank changes what was averaged by itself (noise of its own, a factor, a mask), or the step takes something else",
                "what is done to averaged gradients must be the same on every rank: add noise before the reduction, or draw it from a generator that is "
                "seeded alike on all ranks",
            )
            if written
            else (
                "the result is not written back, or comes after the step",
                "reduce between backward() and step(), and copy the reduced values back in place: `p.grad.copy_(synced)`",
            )
        )
        return self.finding(
            f"{call['op']} carries the model's gradients or parameters, but neither agree between ranks at the step: {why}",
            where=call.where,
            ranks=run.rank_ids,
            notes=[seen],
            help=way,
        )

    def _wrapped_over_a_part(self, run: Run, facts: replicas.Replicas) -> Iterable[Finding]:
        """DDP over groups of ranks that start with one model; groups with models of their own never come here (regime.py)."""
        wraps = [r.of("wrap")[0] for r in run.present if r.of("wrap")]
        teams = sorted({tuple(e["group_ranks"]) for e in wraps if isinstance(e["group_ranks"], list)})
        if len(teams) < 2 or len(wraps) < len(run.present):
            raise NotApplicable("a model is wrapped in DistributedDataParallel, over all ranks")
        if any(_agreeing_ranks(p) == [list(t) for t in teams] for p in facts.partings.values() if p.num_grad >= 0.9 * p.steps > 1):
            yield self.finding(
                f"DistributedDataParallel averages over groups of {len(teams[0])} of {run.world_size} ranks: "
                f"{len(teams)} models come of the one that all ranks start with",
                where=wraps[0].where,
                ranks=run.rank_ids,
                notes=["gradients agree among ranks " + ", and among ranks ".join(" and ".join(map(str, t)) for t in teams[:4])],
                help="leave process_group out, or pass a group of all ranks that hold this model",
            )

    def _over_a_part(self, run: Run, call: Event, groups: list[list[int]]) -> Finding:
        size = call["group_size"] if isinstance(call["group_size"], int) else len(groups[0])
        return self.finding(
            f"{call['op']} of the gradients runs over sub-groups of {size} of {run.world_size} ranks: {len(groups)} models are trained",
            where=call.where,
            ranks=run.rank_ids,
            notes=["gradients agree among ranks " + ", and among ranks ".join(" and ".join(map(str, g)) for g in groups[:4])],
            help="reduce over all ranks that hold this model: leave `group` out, or reduce between the groups as well",
        )


def _told(run: Run, call: Event) -> Event | None:
    """What the source says of a call's statement."""
    return next((e for e in run.present[0].of("coll_site") if e.where == call.where and e["op"] == call["op"]), None)


def _too_early(run: Run, calls: Sequence[Event]) -> tuple[Event, int, int] | None:
    """(a reduction, how many backwards of its step come before the last of them, how many there are) where some come behind it at every step that has
    reductions between its backwards."""
    counts: dict[int, tuple[int, int]] = {}
    index, total = run.present[0].step_index, run.present[0].column("num_backward")
    for e in calls:
        if e.step in index and (before := number(e["graded"])):
            counts[e.step] = max(before, counts.get(e.step, (0, 0))[0]), total[index[e.step]]
    if len(counts) < 2 or any(before >= all_of for before, all_of in counts.values()):
        return None
    first = next(e for e in calls if e.step in counts)
    return first, *counts[first.step]


def _agreeing_ranks(parting: replicas.Parting) -> list[list[int]]:
    """Ranks whose gradients agree at the first step at which they differ at all."""
    together: dict[int, list[int]] = {}
    for rank, row in enumerate(parting.first_rows):
        together.setdefault(row.grad, []).append(rank)
    return list(together.values())


def _behind_the_step(run: Run, calls: Sequence[Event], numels: Sequence[int]) -> bool:
    """Whether the reductions that carry this much all come after a step and before the next backward. Where nothing runs backward, nobody knows."""
    carrying = [e for e in calls if number(e["numel"]) >= sum(numels) or e["numel"] in numels]
    return any(run.present[0].column("num_backward")) and not any(e["graded"] or e["inside"] for e in carrying)


def _at_most_steps(run: Run, opt: int, steps: set[int], start: int) -> bool:
    """Whether `steps` are at least half of an optimizer's, from its first behind `start` to its last: a round of local steps is averaged behind it."""
    rows = run.present[0]
    own = [s for s, o in zip(rows.column("step"), rows.column("opt"), strict=True) if o == opt and s >= start]
    return bool(own) and 2 * sum(own[0] <= s <= own[-1] for s in steps) >= len(own)
