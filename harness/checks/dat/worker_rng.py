"""DAT113 worker-rng-identical: the loader workers of all ranks draw the same random numbers.

What it does
    Compares the base seed from which a loader seeds its workers, what `worker_init_fn` seeded instead, and the states of generators that
    the dataset owns; looks in the workers whether fetching a sample draws from them. Of a generator that the dataset or its transform holds:
    in which state the workers of one rank, and the worker of one number on all ranks, find it and leave it.

Why it is bad
    Worker 0 of every rank augments its n-th sample alike; with a generator that the dataset owns so do all workers of one rank.

Wrong
    loader = DataLoader(dataset, num_workers=4, generator=torch.Generator().manual_seed(seed))

    def worker_init_fn(worker_id): np.random.seed(worker_id)

    def worker_init_fn(worker_id): get_worker_info().dataset.mask.rng.seed(get_worker_info().seed % 2**32)      # equal where all ranks seed torch alike

    self.rng = np.random.default_rng(seed)          # in the dataset: copied into each worker, anew in each epoch

Right
    def worker_init_fn(worker_id): np.random.seed(torch.initial_seed() % 2**32)

    def worker_init_fn(worker_id): get_worker_info().dataset.rng = np.random.default_rng(torch.initial_seed())

    loader = DataLoader(dataset, num_workers=4, generator=torch.Generator().manual_seed(seed + rank))

Known limits
    Sees workers that are forked. A dataset that seeds anew for each sample (by its index, say) is healthy. Streams (IterableDataset) may
    need equal draws to split a shuffled list, and are not judged. A generator that `worker_init_fn` seeds without the rank is advice only where the
    dataset has `__getitems__`: it may draw once a batch, for a choice that all ranks are to share. One drawn from for each sample there looks the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import noise, passes, together
from harness.checks.dat.passes import Pass
from harness.checks.dat.rank_identical_rng import own_states, owned_finding
from harness.model import Finding, Severity, Where
from harness.record import Run, number, where_of


class WorkerRngIdentical(Check):
    code = "DAT113"
    name = "worker-rng-identical"
    severity = Severity.WARNING
    explains = ("DAT109",)

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        worked = [p for p in passes.training(run) if number(p.opened["num_workers"]) > 0 and not p.iterable]
        aligned = passes.aligned(run, worked)
        groups = [g for g in aligned if all(any(_moved(p)) or _copied(p) for p in g)]
        held = [g for g in aligned if all(_found_states(p) for p in g)]
        if not groups and not held:
            raise NotApplicable("no training pass whose workers draw at random")
        found = self._seeded_alike(run, groups)
        if found is not None:
            yield found
            return
        seeded = [g for g in groups if all(any(_moved(p)[:3]) for p in g)]
        same = [g for g in seeded if len({repr(p.opened["base_seed"]) for p in g}) == 1 and g[0].opened["base_seed"] is not None]
        if same and len(same) == len(seeded):
            yield self._found(run, same)
            return
        for group in groups:
            name = _shared_state(group)
            if name:
                yield owned_finding(self, run, group[0], name)
                return
        if groups and all(_copied(p) for g in groups for p in g):
            yield self._copies(run, groups)
        elif held and all(_twins(g) for g in held):
            yield self._held(run, held)

    def _held(self, run: Run, held: list[list[Pass]]) -> Finding:
        """A generator that a transform holds, given by `worker_init_fn` what has no rank in it."""
        first = held[0][0]
        name = str(first.closed["worker_own"].get("name")) if first.closed is not None else ""
        batched = first.closed is not None and bool(first.closed["worker_own"].get("batched"))
        nth = "batch" if batched else "sample"
        seeds = repr(first.opened["base_seed"]) == repr(held[0][1].opened["base_seed"])
        return self.finding(
            f"the dataset's generator `{name}` is in the same state in worker k of every rank: the n-th {nth} of each gets the same draws",
            where=where_of(first.opened["seeds_workers"]) or _made_at(first) or first.made_dataset,
            ranks=run.rank_ids,
            notes=[
                f"{len(held)} passes, {number(first.opened['num_workers'])} workers a rank",
                *(["`get_worker_info().seed` is equal on all ranks: their torch generators were seeded alike"] if seeds else []),
            ],
            help=("fine for a choice that all ranks are to share (the side of a batch's images); for any other " if batched else "")
            + "add the rank to what `worker_init_fn` seeds it with: `info.seed + rank * info.num_workers`",
            severity=Severity.ADVICE if batched else None,
        )

    def _copies(self, run: Run, groups: list[list[Pass]]) -> Finding:
        """One generator, one state: no worker of a rank was given its own, in no pass."""
        first = groups[0][0]
        name, where = _copied(first) or ("", None)
        again = [g[0] for g in groups if g[0].key == first.key]
        every = len(again) > 1 and not first.opened["persistent"] and len({repr(_found_states(p)) for p in again}) == 1
        return self.finding(
            f"the workers of a rank draw the same random numbers: each holds a copy of the dataset's generator `{name}`, in one state",
            where=where or first.made_dataset,
            ranks=run.rank_ids,
            notes=[
                f"{number(first.opened['num_workers'])} workers a rank find it in one state and leave it in one state",
                *([f"new workers start in that state again: the draws of each of {len(again)} epochs are equal"] if every else []),
            ],
            help=f"give each worker its own in `worker_init_fn`: `get_worker_info().dataset.{name}` seeded with `get_worker_info().seed`",
        )

    def _seeded_alike(self, run: Run, groups: list[list[Pass]]) -> Finding | None:
        """`worker_init_fn` gave a generator that is drawn from the same seed on all ranks."""
        told = [(g, name) for g in groups if (name := _alike(g))]
        if not told or len(told) < len([g for g in groups if all(_seeds(p) for p in g)]):
            return None
        first, name = told[0][0][0], told[0][1]
        again = [g[0] for g, _ in told if g[0].key == first.key]
        every = len(again) > 1 and not first.opened["persistent"] and len({repr(_seeds(p)) for p in again}) == 1
        return self.finding(
            f"{name}'s generator has the same seed in the workers of all ranks, and each sample draws from it",
            where=where_of(first.opened["seeds_workers"]) or _seeded_at(run, first),
            ranks=run.rank_ids,
            notes=[f"{len(told)} passes" + (", with the same draws in each of them" if every else "")],
            help="seed from `torch.initial_seed()` (it differs by rank, worker and epoch if the loader's generator does), or add the rank and epoch",
        )

    def _found(self, run: Run, same: list[list[Pass]]) -> Finding:
        first = same[0][0]
        return self.finding(
            f"the loader's workers have the same seed on all ranks ({first.opened['base_seed']}), and draw from it for each sample",
            where=_seeded_at(run, first),
            ranks=run.rank_ids,
            notes=[f"{len(same)} passes, {number(first.opened['num_workers'])} workers a rank"],
            help="seed the loader's generator (or torch.manual_seed, before the loader starts its workers) with seed + rank",
        )


def _moved(one: Pass) -> list[bool]:
    """Which generators a worker was seen to draw from: torch's, python's, numpy's, the dataset's own."""
    flags = one.closed["worker_random"] if one.closed is not None else None
    return [bool(f) for f in flags[:4]] if isinstance(flags, list) and len(flags) >= 4 else [False] * 4


def _found_states(one: Pass) -> list[list[int]]:
    """Of each worker: the state in which it found the dataset's generator, in which its first fetch left it, and its second."""
    told = one.closed["worker_own"] if one.closed is not None else None
    rows = told.get("workers") if isinstance(told, Mapping) else None
    return [[number(v) for v in r] for r in rows if isinstance(r, list) and len(r) == 3] if isinstance(rows, list) else []


def _twins(group: list[Pass]) -> bool:
    """Worker k of every rank found the dataset's generator in one state and left it in one, twice, while the ranks drew different samples; a dataset
    that seeds anew for each sample, by its index, leaves it elsewhere on each rank."""
    tables = [_found_states(p) for p in group]
    if any(t != tables[0] for t in tables[1:]) or passes.same_order(group):
        return False
    return all(len(set(row)) == len(row) and row[2] for row in tables[0])


def _made_at(one: Pass) -> Where | None:
    return where_of(one.closed["worker_own"].get("site")) if one.closed is not None else None


def _copied(one: Pass) -> tuple[str, Where | None] | None:
    """Name and origin of a generator that several workers found in one state, and drew from alike."""
    rows = _found_states(one)
    if one.closed is None or len(rows) < 2 or len({(found, left) for found, left, _ in rows}) > 1:
        return None
    found, left, later = rows[0]
    if not all(row[2] for row in rows) or len({found, left, later}) < 3 or any(row[2] == left for row in rows):  # seeded with one value for each sample
        return None
    return str(one.closed["worker_own"].get("name")), where_of(one.closed["worker_own"].get("site"))


def _seeds(one: Pass) -> list[list[int]]:
    """Of each worker: what torch's, python's and numpy's generator were seeded with."""
    found = one.closed["worker_seeds"] if one.closed is not None else None
    rows = found if isinstance(found, list) else []
    return [[number(v) for v in r] for r in rows if isinstance(r, list) and len(r) == 3]


def _alike(group: list[Pass]) -> str:
    """A generator that the workers of all ranks draw from, seeded alike though the workers' own seeds differ."""
    tables = [_seeds(p) for p in group]
    if len({repr(p.opened["base_seed"]) for p in group}) == 1 or len({len(t) for t in tables}) != 1:
        return ""
    for kind, name in enumerate(("torch", "python", "numpy")):
        columns = {tuple(row[kind] for row in table) for table in tables}
        if len(columns) == 1 and any(next(iter(columns))) and all(_moved(p)[kind] for p in group):
            return name
    return ""


def _seeded_at(run: Run, one: Pass) -> Where | None:
    if one.opened["generator_seed"] is not None and where_of(one.opened["made_generator"]):
        return where_of(one.opened["made_generator"])
    return noise.seeded_at(run, one.opened.t_ns) or one.made


def _shared_state(group: list[Pass]) -> str:
    """Name of a generator of the dataset whose state, which every worker starts from, is equal on all ranks; what the workers themselves have
    found and left counts more: a worker_init_fn, or its first sample, may have given each its own."""
    owns = [own_states(p)[0] for p in group]
    states = [{tuple(row[:2]) for row in _found_states(p)} for p in group]
    if not all(_moved(p)[3] for p in group) or (all(states) and not set.intersection(*states)):
        return ""
    return next((str(n) for n in owns[0] if len({repr(o.get(n)) for o in owns}) == 1), "")
