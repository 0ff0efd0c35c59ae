"""SYN134 local-sgd-never-averages: the ranks' models part on purpose, and nothing brings them together again

What it does
    In a run of local SGD (DDP's `post_localSGD_hook`, a model averager) looks for a step from which on the ranks' parameters differ and
    behind which nothing as large as the model is averaged or sent, other than what the hook does inside a sub-group: to the end of the run, or
    until a warm-up ends that goes on for more than two periods after the models have parted.

Why it is bad
    The averager's warm-up is counted in calls and may lie behind the end of the run, or nobody calls the averager: each rank trains
    its own model on its own shard, and one of them is saved.

Wrong
    PostLocalSGDState(None, subgroup, start_localSGD_iter=100)
    PeriodicModelAverager(period=4, warmup_steps=10_000)

Right
    PeriodicModelAverager(period=4, warmup_steps=100)     # the step at which local SGD starts

Known limits
    Inconclusive where the run ends before the first average is due. A warm-up that ends later than local SGD starts is a warning. An averager
    that is never called is judged at the run's own end, where at least half of its steps, and 16, were local ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.syn import pairing, replicas
from harness.model import Finding, Severity
from harness.record import Event, Run, number

MIN_LOCAL_STEPS = 16  # of a run whose averager is never called: a shorter one may be a trial


class LocalSgdNeverAverages(Check):
    code = "SYN134"
    name = "local-sgd-never-averages"
    severity = Severity.ERROR
    provisional = True

    def end(self, run: Run) -> Iterable[Finding]:
        hook, made, called = _local_sgd(run)
        start, numel = _parted(run)
        averaged = _averaged_at(run, start, numel)
        if averaged is not None:
            begins = number(hook["start"]) if hook else 0
            yield from self._late(run, max(start, begins), averaged, made or called, called)
            return
        if not _differ_at_the_end(run):
            raise NotApplicable("the ranks' models agree at the end")
        local = run.num_steps - start
        period, warmup = (int(called[k] or 0) for k in ("period", "warmup")) if called else (0, 0)
        if called and period:
            if warmup <= start + period and local < 2 * period:
                raise Inconclusive(f"{local} local steps, an average is due every {period}")
            why = f"the averager's warm-up takes {warmup} calls" if warmup > start else f"an average was due every {period} steps"
        elif called or not run.finished or local < MIN_LOCAL_STEPS or local < start:
            raise Inconclusive(f"{local} local steps, and no period is known")
        else:
            why = "the averager is never called" if made else "there is no averager"
        site = (made or called if warmup > start else called or made) or hook
        yield self.finding(
            f"the ranks' models part at step {start} and are never averaged in the {local} steps that follow: {why}",
            where=site.where if site else None,
            ranks=run.rank_ids,
            severity=None if called else Severity.WARNING,
            help="let the averager's warm-up end where local SGD starts, and call average_parameters() after every optimizer.step()",
        )

    def _late(self, run: Run, start: int, averaged: int, site: Event | None, called: Event | None) -> Iterable[Finding]:
        """The averager begins long after the ranks' models have parted."""
        period, warmup = (int(called[k] or 0) for k in ("period", "warmup")) if called else (0, 0)
        between = min(averaged, warmup) - start
        if not period or between <= 2 * period:
            return
        yield self.finding(
            f"the ranks' models part at step {start} and are first averaged at step {averaged}: the averager's warm-up takes {warmup} calls",
            where=site.where if site else None,
            ranks=run.rank_ids,
            severity=Severity.WARNING,
            notes=[f"nothing brings the models together in the {between} steps between; from then on they are averaged every {period} steps"],
            help="let the averager's warm-up end where local SGD starts",
        )


def _local_sgd(run: Run) -> tuple[Event | None, Event | None, Event | None]:
    """(the hook that ceases to average, the averager's construction, its first call)."""
    if len(run.present) < 2:
        raise NotApplicable("one process")
    hook = next((e for _, e in run.events("comm_hook") if e["name"] == "post_localSGD_hook"), None)
    made = next((e for _, e in run.events("model_averager")), None)
    called = next((e for _, e in run.events("averager_called")), None)
    if not (hook or made or called):
        raise NotApplicable("no local SGD")
    return hook, made, called


def _parted(run: Run) -> tuple[int, int]:
    """(first step whose parameters differ, elements of that optimizer's parameters)."""
    facts = replicas.of(run)
    parted = [(p.param_step, opt) for opt, p in facts.partings.items() if p.param_step is not None]
    if not parted:
        raise NotApplicable("the ranks' models do not part")
    start, opt = min(parted)
    event = facts.params_event(opt)
    if event is None or not event["numels"]:
        raise NotApplicable("the parameters' sizes are not known")
    return start, sum(event["numels"])


def _differ_at_the_end(run: Run) -> bool:
    """At the last step whose parameters were hashed."""
    last = next((s for s in reversed(list(run.steps())) if s.complete and s.taken("param")), None)
    return last is not None and not last.same("param")


def _averaged_at(run: Run, start: int, numel: int) -> int | None:
    """The step by which the script's or the averager's collectives have moved as many elements since; a hook's own do not count. None where they
    never do."""
    moved = 0
    for e in run.present[0].of("coll"):
        if e.step > start and e["op"] in (*replicas.MOVERS, "all_reduce_coalesced") and not e["hook"] and e.where is not None:
            moved += int(e["numel"]) if isinstance(e["numel"], int) else 0
            if moved >= numel:
                return e.step - 1
    if any(len(r.of("coll")) >= pairing.MAX_EVENTS for r in run.present):
        raise Inconclusive("more collectives than a recording keeps")
    return None
