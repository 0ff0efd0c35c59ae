"""OPT103 lr-diverges: ranks step with different hyper-parameters

What it does
    Compares lr, weight decay, betas and momentum of every group across ranks at each step; and what a schedule that follows a metric
    (`ReduceLROnPlateau`) is given, which is a warning as soon as it differs, before the rates have parted.

Why it is bad
    Gradients agree, the update does not: the replicas part. Typical is a schedule driven by a rank's own progress or metric.

Wrong
    scheduler.step(val_loss)              # each rank's own val_loss

Right
    dist.all_reduce(val_loss, op=dist.ReduceOp.AVG)
    scheduler.step(val_loss)

Known limits
    A schedule that only one rank steps is not judged by its metric, nor one whose rate the ranks bring into line afterwards.
    Optimizers on ranks that train different models, or that never share a gradient, in all of the run or in a phase without DDP (population based
    training), are not compared, nor what lies beside DDP and never shares a gradient: a head that each rank keeps to itself.
    Under `Join` the ranks are compared at the same step of the same context. A warning where the ranks have taken other numbers of steps alone before, so that
    their gradients were not looked at in the same steps.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.opt import optimizers
from harness.checks.syn import gradients, members, replicas
from harness.checks.syn.replicas import Parting
from harness.model import Finding, Severity
from harness.probe import protocol
from harness.record import Event, Recording, Run


class LrDiverges(Check):
    code = "OPT103"
    name = "lr-diverges"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT111", "OPT114", "EVL103")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run)
        for opt, parting in sorted(facts.partings.items()):
            at = _moment(run, parting)
            if not at or members.share_nothing(run, facts, parting) or members.beside(facts, parting):
                continue
            if not facts.num_reduce and parting.num_grad >= 0.9 * parting.steps and not gradients.ever_agree(run):
                raise NotApplicable("the ranks never share a gradient: each trains a member of its own, at its own rate")
            lrs = optimizers.lr_at(run, at)
            site = replicas.odd_site(list(run.events("scheduler")), run.world_size) or replicas.first_where(run, "scheduler")
            event = facts.params_event(opt)
            yield self.finding(
                f"ranks step with different hyper-parameters from step {at[0]} on: lr {', '.join(f'{v:.6g}' for v in lrs)}",
                where=site or (event.where if event else None),
                ranks=replicas.majority_out(lrs) or run.rank_ids,
                notes=["gradients agree there", *_followed_apart(run)],
                help="drive the schedule by something all ranks share: the step count, or a metric that was all-reduced",
            )
            return
        unseen = _moment_unseen(run, facts)
        if unseen:
            yield self.finding(
                f"ranks step with different learning rates from step {unseen[0]} on: {', '.join(f'{v:.6g}' for v in unseen[1])}",
                where=replicas.odd_site(list(run.events("scheduler")), run.world_size) or replicas.first_where(run, "scheduler"),
                ranks=replicas.majority_out(unseen[1]) or run.rank_ids,
                severity=Severity.WARNING,
                notes=["whether gradients agree there was not looked at: the ranks had taken other numbers of steps before"],
                help="drive the schedule by something all ranks share: the step count, or a metric that was all-reduced",
            )
            return
        yield from self._parting_soon(run, facts)

    def _parting_soon(self, run: Run, facts: replicas.Replicas) -> Iterable[Finding]:
        """The rates agree so far; what drives them does not."""
        parted = any(_moment(run, p) or (p.hyper_step is not None and not _joined(run)) for p in facts.partings.values())
        if parted or not (facts.wrapped or gradients.ever_agree(run)):
            return
        apart = {opt for opt, p in facts.partings.items() if members.share_nothing(run, facts, p)}
        for events in _followed(run):
            if events[0]["opt"] in apart:
                continue
            values = [float(e["metric"]) for e in events]
            if len({e["lr"] for e in events}) > 1:
                return  # one rank's schedule has acted, and the rates are equal all the same: they are brought into line
            if not _alike(values):
                yield self.finding(
                    f"the schedule follows a metric of each rank's own: {', '.join(f'{v:.6g}' for v in values[:8])}",
                    where=events[0].where,
                    ranks=run.rank_ids,
                    severity=Severity.WARNING,
                    notes=[
                        f"at step {events[0].step}; the learning rates are equal so far, and part when one rank's metric stands still first",
                        *_left_on_one(run, events),
                    ],
                    help="all-reduce the metric before the schedule is given it",
                )
                return


def _moment(run: Run, parting: Parting) -> list[int]:
    """The first step at which the hyper-parameters differ, a rank each; empty where they do at none that the ranks take together, or after their
    gradients."""
    if not _joined(run):
        early = parting.hyper_step is not None and not (parting.num_grad and parting.grad_step is not None and parting.grad_step < parting.hyper_step)
        return [parting.hyper_step] * len(run.present) if early and parting.hyper_step is not None else []
    tables = [_within_joins(r, parting.opt) for r in run.present]
    for key in sorted(set(tables[0]).intersection(*tables[1:])):
        rows = [t[key] for t in tables]
        if len({hyper for _, hyper, _ in rows}) > 1:
            return [step for step, _, _ in rows]
        if len({grad for _, _, grad in rows}) > 1:
            return []
    return []


def _moment_unseen(run: Run, facts: replicas.Replicas) -> tuple[int, list[float]] | None:
    """The first step of what DDP wraps at which the rates differ, where no digest of it could be compared (steps of the ranks' own came before, see
    harness/solo.py). Where the steps are counted exactly there is no gap before it."""
    unseen = {opt for opt, p in facts.partings.items() if not p.steps and facts.ddp_names(opt)} if facts.num_reduce and not _joined(run) else set()
    for at, step in enumerate(run.steps() if unseen else ()):
        if step.index != at or not step.complete:
            return None
        lrs = step.number("lr")
        if unseen.issuperset(step.number("opt")) and all(map(math.isfinite, lrs)) and not _alike(lrs):
            return step.index, lrs
    return None


def _joined(run: Run) -> bool:
    return any(True for _ in run.events("join"))


def _within_joins(recording: Recording, opt: int) -> dict[tuple[int, int], tuple[int, bytes, bytes]]:
    """(how many Join contexts were entered, steps since then) -> step, digests of hyper-parameters and gradients. Ranks may take other numbers of steps
    in one, so that steps of the same number lie in different epochs; they enter the next together."""
    entered = sorted(e.step for e in recording.of("join"))
    hyper, grad = protocol.DIGEST_SLICE["hyper"], protocol.DIGEST_SLICE["grad"]
    found: dict[tuple[int, int], tuple[int, bytes, bytes]] = {}
    for i, (step, of) in enumerate(zip(recording.column("step"), recording.column("opt"), strict=True)):
        num, raw = bisect_right(entered, step), recording.raw(i)
        if of == opt and any(raw[hyper]):
            found[num, step - (entered[num - 1] if num else 0)] = step, raw[hyper], raw[grad]
    return found


def _followed(run: Run) -> list[list[Event]]:
    """The n-th value that a schedule is given at one statement, a rank each; only where every rank gives as many."""
    tables: dict[str, list[list[Event]]] = {}
    for recording in run.present:
        own: dict[str, list[Event]] = {}
        for event in recording.of("scheduler"):
            if isinstance(event["metric"], (int, float)) and math.isfinite(event["metric"]) and event.where is not None:
                own.setdefault(f"{event.where.file}:{event.where.line}:{event['kind']}", []).append(event)
        for key, events in own.items():
            tables.setdefault(key, []).append(events)
    found = [columns for columns in tables.values() if len(columns) == run.world_size > 1 and len({len(c) for c in columns}) == 1]
    return sorted((list(events) for columns in found for events in zip(*columns, strict=True)), key=lambda events: events[0].t_ns)


def _followed_apart(run: Run) -> list[str]:
    """What a schedule that follows a metric was given, the first time that it was not the same."""
    events = next((events for events in _followed(run) if not _alike([float(e["metric"]) for e in events])), None)
    if events is None:
        return []
    given = ", ".join(f"{float(e['metric']):.6g}" for e in events[:8])
    return [f"at step {events[0].step} the schedule was given {given}", *_left_on_one(run, events)]


def _left_on_one(run: Run, given: list[Event]) -> list[str]:
    """The statement that made the metric, where that is a `reduce`: the collective called last before the schedule's step, on every rank."""
    before = [[c for c in r.of("coll") if c.t_ns < e.t_ns and c.step == e.step] for r, e in zip(run.present, given, strict=True)]
    last = [max(calls, key=lambda c: c.t_ns) for calls in before if calls]
    where = last[0].where if len(last) == len(given) and all(c["op"] == "reduce" and not c["grad"] for c in last) else None
    return [f"`reduce` leaves the result on one rank, the others keep their own: {where.place}: {where.text}; use all_reduce"] if where else []


def _alike(values: list[float]) -> bool:
    """Up to what the order of a sum makes of it."""
    return max(values) - min(values) <= 1e-5 * max(map(abs, values))
