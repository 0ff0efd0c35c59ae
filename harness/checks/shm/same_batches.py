"""SHM107 workers-draw-same-batches: worker processes that train one shared model draw the same batches in the same order.

What it does
    Compares the sample indices and the content of the batches that the script's own worker processes (hogwild) draw in training, or, without
    a DataLoader, what each of them feeds the model in its first 32 batches; and whether they step the same parameters towards the same targets.

Why it is bad
    N workers do the work of one: each gradient is applied N times, nearly unchanged, which is a learning rate N times as high on the
    same data.

Wrong
    def train(rank, model):
        torch.manual_seed(args.seed)
        loader = DataLoader(dataset, shuffle=True)

Right
    def train(rank, model):
        torch.manual_seed(args.seed + rank)
        loader = DataLoader(dataset, shuffle=True)

Known limits
    Without a DataLoader at least eight batches, on the CPU, are needed; a batch that never changes is healthy there. Workers that train models
    of their own (a search over settings), that step other parameters (a head or a block of layers each) or that have other targets on the same inputs
    (a task each), and those that only evaluate are healthy; so are workers whose targets are computed from the weights as they find them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.dat import passes
from harness.checks.dat.passes import Pass
from harness.checks.shm import same_work
from harness.checks.shm.workers import Team, teams
from harness.model import Finding, Severity, Where
from harness.record import Event, Recording, Run, where_of

MIN_BATCHES, MIN_FED = 3, 8


class SameBatches(Check):
    code = "SHM107"
    name = "workers-draw-same-batches"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        crews = teams(run)
        alike = [team for team in crews if same_work.is_same(_stepping(team))]
        found = [group for team in alike if len(group := _training(team)) > 1]
        by_hand = [fed for team in alike if len(fed := _fed(team)) > 1] if not found else []
        if not found and not by_hand:
            if any(len(_training(crew)) > 1 or len(_fed(crew)) > 1 for crew in crews):
                return  # each has a work of its own
            raise NotApplicable("no worker processes train one shared model from batches that are seen")
        for fed in by_hand:
            if _same_inputs([passes.unpack(e["digests"]) for e in fed]):
                yield self._drawn_alike(fed)
                return
        unseen = False
        for group in found:
            same = _same([own for _, own in group])
            unseen = unseen or same is None
            if same:
                yield self._found(group)
                return
        if unseen:
            raise Inconclusive("equal indices, but whether the samples behind them are the same is not seen")

    def _found(self, group: Sequence[tuple[Recording, list[Pass]]]) -> Finding:
        recording, (first, *_) = group[0]
        shuffled = first.opened["sampler"] != "SequentialSampler"
        return self.finding(
            f"all {len(group)} workers draw the same samples in the same order: {first.num_samples} of {first.num_samples} indices are equal",
            where=_seeded(recording, first) if shuffled else first.made,
            ranks=[0],
            notes=[f"sampler: {first.opened['sampler']}" + (f", made at {first.made.place}" if first.made else "")],
            help="seed each worker with seed + rank, or give it its own part of the data (`Subset(dataset, range(rank, n, workers))`)",
        )

    def _drawn_alike(self, fed: Sequence[Event]) -> Finding:
        num = min(len(passes.unpack(e["digests"])) for e in fed)
        return self.finding(
            f"all {len(fed)} workers draw the same batches in the same order: the model's inputs are bit-equal in {num} of {num} batches",
            where=where_of(fed[0]["seeded"]) or fed[0].where,
            ranks=[0],
            notes=["no DataLoader: compared is what each worker feeds the model"],
            help="seed each worker's generator with seed + rank, or give it its own part of the data (`range(rank, n, workers)`)",
        )


def _stepping(team: Team) -> list[Recording]:
    """The workers that step a model which lies in shared memory."""
    return [w.recording for w in team.workers if w.recording is not None and w.steps_shared]


def _fed(team: Team) -> list[Event]:
    """What the workers that step a model in shared memory fed it, where none of them draws from a DataLoader."""
    own = _stepping(team)
    return [] if any(w.of("loader") for w in own) else [e for w in own for e in w.of("worker_fed")[:1]]


def _same_inputs(columns: Sequence[Sequence[int]]) -> bool:
    """Batch by batch, while the batches themselves change."""
    num = min(map(len, columns))
    if num < MIN_FED or any(list(c[:num]) != list(columns[0][:num]) for c in columns):
        return False
    return 2 * len(set(columns[0][:num])) >= num


def _training(team: Team) -> list[tuple[Recording, list[Pass]]]:
    """(process, its training passes) of those workers."""
    found = []
    for recording in _stepping(team):
        own = [p for p in passes.of_recording(0, recording) if p.closed is not None and p.trains and not p.iterable]
        if own:
            found.append((recording, own))
    return found


def _same(groups: Sequence[Sequence[Pass]]) -> bool | None:
    """Whether every worker's n-th pass has the same indices and the same content; None: what lies behind the indices is not known."""
    num = min(len(g) for g in groups)
    unseen = False
    for nth in range(min(num, 16)):
        row = [g[nth] for g in groups]
        if min(p.num_batches for p in row) < MIN_BATCHES or not passes.same_order(row) or not all(p.indices for p in row):
            return False
        if len({p.dataset_len for p in row}) > 1 or len({p.content for p in row}) > 1:
            return False
        unseen = unseen or not all(p.distinct and p.content for p in row)
    return None if unseen else True


def _seeded(recording: Recording, first: Pass) -> Where | None:
    """The worker's last seeding before its first pass; where it has none of its own, the statement that made the loader."""
    calls = [e.where for e in recording.of("seed") if e["what"] == "torch" and e.t_ns < first.opened.t_ns and e.where]
    return calls[-1] if calls else first.made
