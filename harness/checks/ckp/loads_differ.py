"""CKP114 ranks-load-different-weights: replicas are equal, then each rank loads weights of its own.

What it does
    Compares digests of the parameters that `load_state_dict` is given, and of those it replaces, over the ranks: equal before, different
    after. A finding where training goes on with them, or where the ranks then measure shares of one data set; else advice.

Why it is bad
    The best epoch by a rank's own metric is another one on each rank. The numbers that are summed up afterwards are of several models, none
    of which anybody has.

Wrong
    if local_loss < best:                                          # another epoch on each rank
        best, kept = local_loss, copy.deepcopy(model.state_dict())

Right
    dist.all_reduce(local_loss)                                    # the same number, so the same epoch, on every rank
    if local_loss < best: ...

Known limits
    Parameters only: buffers may differ by rank. A load that DDP or a broadcast makes equal again is healthy, and so are ranks that train
    models of their own. The first eight loads of a statement are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks.base import Check, NotApplicable
from harness.checks.ckp import files
from harness.checks.dat import together
from harness.checks.evl import evaluations
from harness.checks.syn import replicas
from harness.model import Finding, Severity, Where
from harness.record import Event, Run, number


class RanksLoadDifferentWeights(Check):
    code = "CKP114"
    name = "ranks-load-different-weights"
    severity = Severity.WARNING
    explains = ("SYN125", "SYN127")

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        loads = _aligned(run)
        if not loads:
            raise NotApplicable("no model is loaded on every rank")
        for group in loads:
            parted = len({e["weights"] for e in group}) > 1 and len({e["had"] for e in group}) == 1
            if parted and all(e["weights"] and e["had"] for e in group) and not _made_equal(run, group) and not _parted_before(run, group):
                yield self._found(run, group)
                return

    def _found(self, run: Run, group: Sequence[Event]) -> Finding:
        first = group[0]
        kept = _kept(run, group)
        trains = any(files.steps_after(r, e) > 0 for r, e in zip(run.present, group, strict=True))
        mixed = any(evaluations.sharded(g) and g[0].opened_ns > first.t_ns for g in evaluations.aligned(run))
        line = f"line {first.where.line}" if first.where else "a load"
        notes = [] if kept is None else [kept[1]]
        if mixed:
            notes.append("the ranks then measure shares of one data set: what is summed up is of different models")
        return self.finding(
            f"{line} gives each rank other weights: they were equal before it",
            where=kept[0] if kept is not None else first.where,
            ranks=run.rank_ids,
            notes=notes,
            help="choose by a number that all ranks share (all-reduce it first), or broadcast the weights of one rank",
            severity=None if trains or mixed else Severity.ADVICE,
        )


def _aligned(run: Run) -> list[list[Event]]:
    """The n-th load at one statement on all ranks."""
    tables: dict[tuple[str, int, int], list[Event]] = {}
    for recording in run.present:
        counts: dict[tuple[str, int], int] = {}
        for event in recording.of("load_state"):
            if event.where is not None and not event["error"]:
                key = (event.where.file.rpartition("/")[-1], event.where.line)
                nth = counts[key] = counts.get(key, -1) + 1
                tables.setdefault((*key, nth), []).append(event)
    return [group for group in tables.values() if len(group) == len(run.present) == run.world_size > 1]


def _parted_before(run: Run, group: Sequence[Event]) -> bool:
    """The replicas had parted in training: what is loaded into a fresh model differs because of that."""
    partings = replicas.of(run).partings.values()
    return any(p.param_step is not None and p.param_step < group[0].step for p in partings)


def _made_equal(run: Run, group: Sequence[Event]) -> bool:
    """DDP wraps a model, or something is broadcast, after the load and before the next step."""
    for recording, load in zip(run.present, group, strict=True):
        later = [e for kind in ("wrap", "coll") for e in recording.of(kind) if e.t_ns > load.t_ns and e.step == load.step]
        if any(e.kind == "wrap" or e["op"] in ("broadcast", "broadcast_object_list", "scatter") for e in later):
            return True
    return False


def _kept(run: Run, group: Sequence[Event]) -> tuple[Where, str] | None:
    """The statement at which the ranks last read the weights out, or saved them, at different steps."""
    for kind in ("state_dict", "save"):
        sites: dict[Where, dict[int, int]] = {}
        for rank, (recording, load) in enumerate(zip(run.present, group, strict=True)):
            for event in recording.of(kind):
                if event.where is not None and event.t_ns < load.t_ns and event.where != load.where:
                    sites.setdefault(event.where, {})[rank] = number(event.step)
        apart = [(w, steps) for w, steps in sites.items() if len(steps) == len(group) and len(set(steps.values())) > 1]
        if apart:
            where, steps = apart[-1]
            return where, "kept at " + ", ".join(f"step {s} (rank {r})" for r, s in list(steps.items())[:4])
    return None
