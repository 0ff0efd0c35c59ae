"""EVL102 metric-from-one-shard: a number measured on one rank's share is reported as that of the whole.

What it does
    For evaluations in which every rank measures its own share: looks for a number that one rank reports afterwards, although nothing was
    synchronised between the measurement and the report, or although the source uses one entry alone of what was gathered from all
    ranks. A reported number that is the mean of what this rank alone measured without
    gradients (losses, numbers read with item()) counts whatever was synchronised between, unless it stands beside the mean over all ranks
    (`loss 0.2790 (0.2714)`). A training loss of one share counts where it is stored in a table as well. Both must be the rank's own in nearly
    all lines of the kind that can tell. Also, in training too: a count over the share that the source divides by the length of the whole set.

Why it is bad
    The number is that of 1/world_size of the data: noisier, and off by more than the differences one looks for. Best checkpoints are
    picked by it.

Wrong
    accuracy = correct / total
    if rank == 0: print(f"accuracy {accuracy:.3f}")

Right
    totals = torch.tensor([correct, total]); dist.all_reduce(totals)
    if rank == 0: print(f"accuracy {totals[0] / totals[1]:.3f}")

Known limits
    Lines that say whose they are ("[rank 1] ...", "local"), and lines that every rank prints, are healthy, and so are
    lines that list what each rank measured. Ranks that exchange numbers
    through files are not seen to do so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes, together
from harness.checks.evl import evaluations, losses, measured, over_whole, reports, usual
from harness.checks.evl.evaluations import Evaluation
from harness.checks.evl.losses import Epoch
from harness.checks.evl.measured import Measured
from harness.checks.evl.reports import Report
from harness.model import Finding, Severity, Where
from harness.record import Run, where_of

TO_ONE = ("reduce", "gather", "gather_object", "recv", "irecv", "send", "isend", "batch_isend_irecv")
TRAINING = re.compile(r"train|grad|norm|temperature|scale|\blr\b", re.IGNORECASE)
MEASURED = re.compile(r"val|test|eval|dev", re.IGNORECASE)
ONE_ENTRY = "all ranks' parts are gathered, and one of them alone is used"
USE_ALL = "concatenate all that was gathered before the metric is computed"
TABLES = (".csv", ".tsv", ".json", ".jsonl", ".txt", ".yaml", ".yml")


class MetricFromOneShard(Check):
    code = "EVL102"
    name = "metric-from-one-shard"
    severity = Severity.WARNING
    explains = ("OUT105",)

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        groups = evaluations.aligned(run)
        shares = [g for g in groups if evaluations.sharded(g)]
        shares += [[e] for e in evaluations.lonely(run)]
        epochs = losses.epochs(run)
        measures = measured.sharded(run)
        if not shares and not epochs and not measures:
            raise NotApplicable("no evaluation in which each rank measures a share of its own")
        for group in shares[:64]:
            found = next((f for e in group[: passes.MAX_COMPARED] if (f := self._reported(run, e, group, epochs)) is not None), None)
            if found is not None:
                yield found
                return
        for own in measures[:64]:
            found = next((f for m in own[: passes.MAX_COMPARED] if (f := self._own_mean(run, m, own, measures, epochs)) is not None), None)
            if found is not None:
                yield found
                return
        divided = over_whole.first(run)
        if divided is not None:
            yield self._over_whole(divided)
            return
        yield from self._stored(run, epochs)

    def _over_whole(self, found: over_whole.Divided) -> Finding:
        one, report = found.one, found.report
        return self.finding(
            f"what rank {one.rank} counts over its {one.num_samples} samples is divided by the {one.dataset_len} of the whole set",
            where=found.where,
            ranks=(one.rank,),
            notes=[f"reported: {report.text[:120]}", "no collective between the loop and the report"],
            help="all-reduce the count on every rank before it is divided",
        )

    def _own_mean(
        self, run: Run, one: Measured, group: Sequence[Measured], measures: list[list[Measured]], epochs: list[Epoch]
    ) -> Finding | None:
        """The mean of what this rank measured, which is not that of all ranks."""
        if one.of == "item" and _gathered_by_one(run, one):
            return None
        for report in usual.reported(run, one):
            if not _speaks_for_all(run, report) or _lists_all(report, group):
                continue
            for place, value in enumerate(report.values()):
                right = measured.is_own(value, one, group)
                if right is None or (one.of == "item" and _is_training_loss(value, one.rank, one.at, epochs)):
                    continue
                if not (one.once and _of_training(report.label(value))) and usual.is_own(run, one, report, place, measures):
                    return self._share(report, one, sum(m.rows for m in group), _told(value, one, right))
        return None

    def _share(self, report: Report, one: Measured, size: int, note: str) -> Finding:
        line = f"line {report.where.line}" if report.where else "a line"
        share = f" ({one.rows} of {size} samples)" if not one.once else ""
        return self.finding(
            f"{line} reports a number of rank {one.rank}'s share{share} as the whole's",
            where=report.where,
            ranks=(one.rank,),
            notes=[f"reported: {report.text[:120]}", note],
            help="all-reduce the sums (correct, total, loss) on every rank, before they are divided and reported",
        )

    def _reported(self, run: Run, one: Evaluation, group: Sequence[Evaluation], epochs: list[Epoch]) -> Finding | None:
        if one.synced_inside:
            return None
        for report in _after(run, one):
            entry = _one_entry(run, one, report) if report.y != one.y else None
            if report.y != one.y and entry is None:
                return None
            if _speaks_for_all(run, report) and [v for v in report.values() if not _is_training_loss(v, one.rank, one.step, epochs)]:
                line = f"line {report.where.line}" if report.where else "a line"
                size = max(sum(e.num_samples for e in group), one.one.dataset_len if one.one is not None else 0)
                share = f"{one.num_samples} of {size} samples"
                return self.finding(
                    f"{line} reports a number of rank {one.rank}'s share ({share}) as the whole's",
                    where=entry or (one.one.result_line(run) if one.one is not None else one.where),
                    ranks=(one.rank,),
                    notes=[f"reported: {report.text[:120]}", ONE_ENTRY if entry else "no collective between the evaluation and the report"],
                    help=USE_ALL if entry else "all-reduce the sums (correct, total, loss) on every rank, before this line divides or returns them",
                )
        return None

    def _stored(self, run: Run, epochs: list[Epoch]) -> Iterable[Finding]:
        """A rank's own mean training loss, in a line whose numbers also go into a table."""
        for epoch in epochs[:64]:
            for rank, one in enumerate(epoch.group[: passes.MAX_COMPARED]):
                if one.closed is None or max(epoch.means) - min(epoch.means) == 0 or epoch.num_steps[rank] < 2:
                    continue
                for report in usual.between(run, rank, one.closed.t_ns, one.closed.step):
                    values = [v for i, v in enumerate(report.values()) if epoch.tells(v, rank) and usual.is_own_loss(run, epoch, report, i, epochs)]
                    table = _table_written(run, rank, one.closed.step)
                    if values and table and _speaks_for_all(run, report):
                        yield self.finding(
                            f"the training loss that rank {rank} reports and stores in {table} is the mean of its own share",
                            where=one.result_line(run),
                            ranks=(rank,),
                            notes=[f"reported {values[0].value:g}; mean over all ranks {epoch.wholes[-1]:.6g}", f"line: {report.text[:120]}"],
                            help="all-reduce the sum of the losses on every rank after this loop, and divide by world_size as well",
                        )
                        return


def _one_entry(run: Run, one: Evaluation, report: Report) -> Where | None:
    """Where one part of what was gathered is used, if nothing else was synchronised between the evaluation and the report."""
    recording = run.ranks[one.rank]
    sites = {(e.where.file, e.where.line): where_of(e["used"]) for e in recording.of("one_entry") if e.where} if recording is not None else {}
    calls = [e.where for e in recording.of("coll") if one.ended_ns < e.t_ns < report.t_ns] if recording is not None and sites else []
    used = [sites.get((w.file, w.line)) if w is not None else None for w in calls]
    return used[0] if used and None not in used and len(used) == report.y - one.y else None


def _of_training(label: str) -> bool:
    """A number that its line calls one of training, or a loss of nothing in particular: OUT105 has those."""
    return bool(TRAINING.search(label)) or ("loss" in label.lower() and not MEASURED.search(label))


def _told(value: reports.Value, one: Measured, right: float) -> str:
    if one.once and one.where is not None:
        return f"line {one.where.line} read {value.value:g} on this rank, and other values on the others: {right:.6g} in the mean"
    return f"{value.value:g} is the mean here, {right:.6g} that over all ranks"


def _after(run: Run, one: Evaluation) -> list[Report]:
    """Reports of the rank after a measurement and before its next one or its next step."""
    later = [e.opened_ns for e in evaluations.by_rank(run)[one.rank] if e.opened_ns > one.ended_ns]
    until = min(later, default=1 << 63)
    return [r for r in reports.all_reports(run)[one.rank] if one.ended_ns < r.t_ns < until and r.step == one.step]


def _speaks_for_all(run: Run, report: Report) -> bool:
    """Only one rank reports it, it does not say whose it is, and it is a metric."""
    if report.tagged or not (report.kind == "scalar" or reports.METRIC.search(report.text)):
        return False
    return reports.num_ranks_at(run, report.where) == 1


def _lists_all(report: Report, group: Sequence[Measured]) -> bool:
    """Whether a line holds a number of every rank's own, one beside the other: equal ones stand there as often as ranks have them."""
    left = [v for v in report.values() if v.digits >= 3]
    for one in group:
        found = next((v for v in left if any(v.is_near(m) or v.is_near(100 * m) for m in one.means)), None)
        if found is None:
            return False
        left.remove(found)
    return len(group) > 1


def _gathered_by_one(run: Run, one: Measured) -> bool:
    """One rank was sent what the others have, before it read its number: theirs is no measure of it."""
    recording = run.ranks[one.rank]
    sent = [e for e in recording.of("coll") if e.step == one.at and e["op"] in TO_ONE] if recording is not None else []
    return any(e.t_ns <= one.last_t for e in sent)


def _is_training_loss(value: reports.Value, rank: int, step: int, epochs: list[Epoch]) -> bool:
    """A number that the line takes from training, not from this measurement."""
    for epoch in epochs:
        if epoch.group[rank].closed is not None and epoch.group[rank].closed.step <= step:  # type: ignore[union-attr]
            known = (epoch.means[rank], epoch.weighted[rank], epoch.lasts[rank], *epoch.wholes, epoch.means[rank] * epoch.num_steps[rank])
            if any(value.is_near(v) for v in known):
                return True
    return False


def _table_written(run: Run, rank: int, step: int) -> str:
    """Name of a table that only this rank opened for writing at that step."""
    recording = run.ranks[rank]
    for event in recording.of("open") if recording is not None else []:
        path = str(event["path"] or "")
        if event.step == step and path.endswith(TABLES):
            return path.rsplit("/", 1)[-1]
    return ""
