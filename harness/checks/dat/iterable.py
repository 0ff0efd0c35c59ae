"""DAT107 iterable-not-sharded: ranks or workers repeat the stream of an IterableDataset.

What it does
    Compares digests of the samples that a stream yields, between ranks, within a rank that has several workers, and between the workers of
    all ranks where the stream adds its rank and its worker's number, or where each worker has a twin on another rank.

Why it is bad
    Every rank and every worker holds a copy of an IterableDataset. A copy that does not ask for its rank yields all of it: ranks train on
    the same samples. One that does not ask for its worker yields each sample num_workers times an epoch.

Wrong
    def __iter__(self):
        return iter(self.samples)

    order[rank + worker.id :: world_size * worker.num_workers]       # two readers share a number, another number nobody has
    order[rank * worker.num_workers + worker.id :: world_size]       # the stride forgets the workers: each share is read by several

    Random(seed + rank).shuffle(files); files = files[rank::world_size]             # each rank cuts an order of its own

    if dist.is_initialized(): rank, world_size = dist.get_rank(), ...      # in a spawned worker there is no process group: 0 of 1 everywhere

    files[int(os.environ.get("SLURM_PROCID", 0)) :: int(os.environ.get("SLURM_NTASKS", 1))]     # under torchrun neither is set: 0 of 1 everywhere

Right
    def __iter__(self):
        worker = get_worker_info()
        num, first = (worker.num_workers, worker.id) if worker else (1, 0)
        return islice(self.samples, rank * num + first, None, world_size * num)      # rank and world_size as the constructor was told them

Known limits
    Samples are told apart by content: a stream with random augmentation that differs by rank is compared by its last tensor (the label)
    where that is different for most samples. Workers that give the same are advice where each by itself gives every sample several times: classes
    in turn, to which the training draws what is random.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.dat import launcher_defaults, passes, readers, together
from harness.checks.dat.not_sharded import cut_afterwards, losses_equal
from harness.checks.dat.passes import Pass
from harness.model import Finding, Severity, Where
from harness.record import Run, number, where_of

MIN_SAMPLES = 8
OWN_STREAMS = "readers (workers of ranks) whose rank and worker number have the same sum draw the same"
BY_READER = "number the readers by `rank * num_workers + worker.id`, and seed each one's generator, or part the samples, by that number"


class IterableNotSharded(Check):
    code = "DAT107"
    name = "iterable-not-sharded"
    severity = Severity.ERROR
    explains = ("DAT102", "DAT109", "DAT113", "DAT114")

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        streams = [p for p in passes.training(run) if p.iterable]
        if not streams:
            raise NotApplicable("no training pass over an IterableDataset")
        summed = self._summed(run, streams)
        if summed is not None:
            yield summed
            return
        told = [p for p in passes.few(streams) if len(_identity(p)) >= MIN_SAMPLES]
        if not told:
            yield from self._alike(run, streams)
            return
        groups = passes.aligned(run, told)
        same = [g for g in groups if len({_head(g, p) for p in g}) == 1]
        if groups and len(same) == len(groups) and not cut_afterwards(run, same[0]):
            yield self._ranks(run, same[0], min(len(_identity(p)) for p in same[0]))
            return
        paired = [(g, twins) for g in groups if not passes.resampled(run, g[0]) and (twins := readers.twins(g)) is not None]
        if paired and len(paired) >= 0.7 * len(groups) and not cut_afterwards(run, paired[0][0]):
            yield self._paired(run, *paired[0])
            return
        mixed = [(g, num) for g in groups if not passes.resampled(run, g[0]) and (num := _overlap(g))]
        if mixed and len(mixed) >= 0.7 * len(groups) and not cut_afterwards(run, mixed[0][0]):
            yield self._shares(run, *mixed[0])
            return
        if repeated := _repeated(told):
            yield self._workers(repeated)

    def _summed(self, run: Run, streams: list[Pass]) -> Finding | None:
        """The stream adds rank and worker number, and readers with one sum read one share, in every pass."""
        groups = passes.aligned(run, [p for p in streams if number(p.opened["num_workers"]) > 1])
        line = _told_line(run, groups[0][0], "reader_sum") if groups else None
        nums = [readers.collide(g) for g in groups] if line is not None else []
        if not nums or not all(nums) or cut_afterwards(run, groups[0]):
            return None
        first, workers = groups[0][0], number(groups[0][0].opened["num_workers"])
        return self.finding(
            f"workers of different ranks read duplicate samples: {first.opened['dataset']} numbers its readers by rank + worker id, and "
            f"worker 1 of rank 0 reads the {nums[0]} samples of worker 0 of rank 1",
            where=line,
            ranks=run.rank_ids,
            notes=[
                f"{run.world_size * workers} readers have {run.world_size + workers - 1} different numbers"
                + ("; the shares of the others are never read" if first.complete else ""),
                f"{len(groups)} of {len(groups)} passes",
            ],
            help=BY_READER,
        )

    def _alike(self, run: Run, streams: list[Pass]) -> Iterable[Finding]:
        """Samples of which many look the same, as ids do: the ranks' go alike, and so do the losses, to the last bit."""
        groups = passes.aligned(run, [p for p in passes.few(streams) if len(set(p.rows)) >= MIN_SAMPLES])
        lengths = [min(len(p.rows) for p in g) for g in groups]
        same = [g for g, num in zip(groups, lengths, strict=True) if len({p.rows[:num] for p in g}) == 1]
        if groups and len(same) == len(groups) and losses_equal(run):
            yield self._ranks(run, same[0], lengths[0])
        elif repeated := _repeated(passes.few(streams)):
            yield self._workers(repeated)
        else:
            raise Inconclusive("the stream's samples could not be told apart")

    def _ranks(self, run: Run, group: list[Pass], num: int) -> Finding:
        message = f"{group[0].opened['dataset']} yields the same samples on all ranks: {num} of {num} are equal"
        asked = _told_line(run, group[0], "worker_group")
        if asked is not None:
            return self.finding(
                f"{message}, for its workers are not forked and have no process group: each takes the default of its rank",
                where=asked,
                ranks=run.rank_ids,
                notes=["what __iter__ does runs in the worker; `dist.is_initialized()` is False there, and the rank is the same in all of them"],
                help="ask for rank and world size in the rank itself and hand them to the dataset's constructor: the workers get them with their copy",
            )
        found = self.finding(
            message,
            where=group[0].made_dataset,
            ranks=run.rank_ids,
            notes=["an IterableDataset is not sharded by the loader"],
            help="let `__iter__` yield every world_size-th sample from `rank` on (and of these every num_workers-th, see get_worker_info)",
        )
        return launcher_defaults.named(found, run)

    def _shares(self, run: Run, group: list[Pass], num: int) -> Finding:
        first, summed = group[0], bool(readers.collide(group))
        return self.finding(
            f"the ranks' shares of {first.opened['dataset']} overlap: {num} of the {len(_identity(first))} samples of rank {first.rank} "
            "are drawn by another rank too",
            where=_told_line(run, first, "own_order") or where_of(first.opened["iter_at"]) or first.made_dataset,
            ranks=run.rank_ids,
            severity=Severity.WARNING,
            notes=[OWN_STREAMS if summed else "no rank draws a sample twice in a pass: each takes its part of an order of its own"],
            help=BY_READER if summed else "shuffle with a generator that all ranks seed alike (seed + epoch), then take every world_size-th from `rank` on",
        )

    def _paired(self, run: Run, group: list[Pass], twins: readers.Twins) -> Finding:
        first, workers = group[0], number(group[0].opened["num_workers"])
        return self.finding(
            f"workers of different ranks read the same share of {first.opened['dataset']}: {twins.common} of the {twins.num} samples of worker 0 of rank "
            f"{first.rank} are read by worker {twins.worker} of rank {twins.rank} too",
            where=_told_line(run, first, "reader_stride") or where_of(first.opened["iter_at"]) or first.made_dataset,
            ranks=run.rank_ids,
            severity=Severity.WARNING,
            notes=[f"{run.world_size * workers} readers ({workers} workers on each of {run.world_size} ranks): each has a twin elsewhere, the stride is too short"],
            help="step by the number of all readers: `order[rank * num_workers + worker.id :: world_size * num_workers]`",
        )

    def _workers(self, repeated: list[Pass]) -> Finding:
        first = repeated[0]
        workers = number(first.opened["num_workers"])
        drawn = _identity(first) or first.rows
        return self.finding(
            f"the {workers} workers of a rank repeat each other: {first.opened['dataset']} yields every sample {workers} times an epoch",
            where=where_of(first.opened["iter_at"]) or first.made_dataset,
            ranks=sorted({p.rank for p in repeated}),
            severity=Severity.ADVICE if all(map(readers.in_turn, repeated)) else None,
            notes=[f"{len(set(drawn))} different samples among {len(drawn)} on rank {first.rank}, the same from each worker"],
            help="split the stream by `get_worker_info()` in `__iter__`",
        )


def _told_line(run: Run, one: Pass, field: str) -> Where | None:
    """What the stream's code says: where it adds its rank and its worker's number, or takes every n-th sample."""
    recording = run.ranks[one.rank]
    told = recording.of("dataset") if recording is not None else []
    return next((at for e in told if e["kind"] == one.opened["dataset"] and (at := where_of(e[field])) is not None), None)


def _identity(one: Pass) -> tuple[int, ...]:
    """Digests that tell samples apart: of the samples, or of labels that are mostly different."""
    for digests in (one.rows, one.labels):
        if len(digests) >= MIN_SAMPLES and len(set(digests)) >= 0.4 * len(digests) / max(1, number(one.opened["num_workers"])):
            return digests
    return ()


def _overlap(group: Sequence[Pass]) -> int:
    """Samples of the first rank that another draws in the same pass, where no rank repeats itself (it would, drawing with replacement)."""
    drawn = [_identity(p) for p in group[: passes.MAX_COMPARED]]
    if any(len(set(d)) < len(d) or len(d) < 2 * MIN_SAMPLES for d in drawn) or len({p.num_samples for p in group}) > 2:
        return 0
    others = set().union(*map(set, drawn[1:]))
    num = len(others & set(drawn[0]))
    return num if num >= max(MIN_SAMPLES, 0.05 * len(drawn[0])) else 0


def _head(group: Sequence[Pass], one: Pass) -> tuple[int, ...]:
    """The common beginning; where samples differ by augmentation, labels stand for them."""
    num = min(len(_identity(p)) for p in group)
    if len({p.rows[:num] for p in group}) > 1 and all(len(set(p.labels)) > 0.5 * len(p.labels) and p.labels for p in group):
        return one.labels[:num]
    return _identity(one)[:num]


def _repeated(told: Sequence[Pass]) -> list[Pass]:
    """Passes whose workers repeat each other, if all passes with several workers do."""
    shared = [p for p in told if number(p.opened["num_workers"]) > 1]
    found = [p for p in shared if readers.echo(p) or _repeats(p)]
    return found if len(found) == len(shared) else []


def _repeats(one: Pass) -> bool:
    """(Nearly) every sample comes num_workers times in one pass."""
    workers = number(one.opened["num_workers"])
    counts = Counter(_identity(one))
    return bool(counts) and sum(1 for n in counts.values() if n == workers) >= 0.8 * len(counts)
