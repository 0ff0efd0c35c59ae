"""DAT104 sampler-wrong-world: a sampler was made for another world or another rank.

What it does
    Compares `num_replicas` and `rank` of the distributed samplers of training passes with the process group, and with what the ranks' data
    sets hold. Where ranks hold shares of one layer (tensor parallelism by DTensor), compares the copies that they hold of its other parameters at the
    first and the ninth step: if they part, and the samplers deal these ranks different samples, an error.

Why it is bad
    With too few replicas, or one rank number twice, ranks train on the same samples; with too many, or over data
    that each rank has already cut its share from, part of the data is not seen. Ranks of a tensor-parallel group compute one output together: from
    different samples they add up activations that do not belong to each other.

Wrong
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0)

Right
    sampler = DistributedSampler(dataset)      # asks the process group
    sampler = DistributedSampler(dataset, num_replicas=mesh["dp"].size(), rank=mesh["dp"].get_local_rank())     # beside tensor parallelism

Known limits
    Ranks that each hold data of their own may have a sampler for one replica: told by samples that no two ranks have in common. There, a
    sampler for all ranks shards a second time, unless the script may have drawn the samples at random, on each rank others: an error where a
    line cuts a share by rank, else a warning. Silent where
    the model is not replicated over the whole world (tensor or pipeline parallel groups have samplers of their own size), but for copies of parameters
    that part within a tensor-parallel group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import launcher_defaults, mesh_copies, passes, together
from harness.checks.dat.contents import contents_of
from harness.checks.dat.passes import Pass
from harness.model import Finding, Severity
from harness.record import Run, number

CUT = re.compile(r"\[[^\]]*\brank\b[^\]]*::?[^\]]*\]|\.shard\(|array_split\([^)]*\)\[[^\]]*\brank\b")  # `records[rank::world_size]`


class WrongWorld(Check):
    code = "DAT104"
    name = "sampler-wrong-world"
    severity = Severity.ERROR
    explains = ("DAT102", "DAT109", "DAT113", "DAT114", "EVL104", "SYN127")

    def end(self, run: Run) -> Iterable[Finding]:
        if (found := self._in_one_team(run)) is not None:
            yield found
            return
        together.required(run)
        sampled = [p for p in passes.training(run) if p.distributed is not None]
        if not sampled:
            raise NotApplicable("no training pass over a distributed sampler")
        wrong = [p for p in sampled if _replicas(p) > 0 and (_replicas(p), _rank(p)) != _place(run, p)]
        own = _own_data(run, sampled)
        if not wrong and own:
            yield from self._twice(run, sampled)
        if not wrong or _covers_in_turn(sampled) or _cut_by_rank(run, wrong) or (own and all(_replicas(p) < run.world_size for p in wrong)):
            return
        first = wrong[0]
        num_ranks, rank = _place(run, first)
        size = _replicas(first) != num_ranks
        told = ", ".join(f"rank {p.rank}: rank {_rank(p)} of {_replicas(p)}" for p in _one_a_rank(wrong)[:8])
        found = self.finding(
            f"the sampler was made for {_replicas(first)} replicas, the process group has {num_ranks}"
            if size
            else f"the sampler of rank {rank} was made for rank {_rank(first)}",
            where=first.made_sampler,
            ranks=sorted({p.rank for p in wrong}),
            notes=[f"sampler by rank: {told}"],
            help="leave `num_replicas` and `rank` out, or pass `dist.get_world_size()` and `dist.get_rank()`",
        )
        yield launcher_defaults.named(found, run)

    def _in_one_team(self, run: Run) -> Finding | None:
        parted = mesh_copies.parted(run)
        if parted is None:
            return None
        *ranks, name = parted
        dealt = [next((p for p in passes.training(run) if p.rank == rank and p.distributed is not None), None) for rank in ranks]
        one, other = dealt
        if one is None or other is None or _replicas(one) != _replicas(other) or _rank(one) == _rank(other) or one.order == other.order:
            return None
        return self.finding(
            f"ranks {ranks[0]} and {ranks[1]} hold shares of one layer, and their samplers deal them different samples",
            where=one.made_sampler,
            ranks=ranks,
            notes=[
                f"sampler by rank: rank {one.rank}: rank {_rank(one)} of {_replicas(one)}, rank {other.rank}: rank {_rank(other)} of {_replicas(other)}",
                f"`{name}`, of which both hold a copy, was the same before the first step and is another one on each of them after eight",
            ],
            help='deal the data over the data-parallel dimension only: `num_replicas=mesh["dp"].size(), rank=mesh["dp"].get_local_rank()`; the ranks of a '
            "tensor-parallel group read the same batch",
        )

    def _twice(self, run: Run, sampled: list[Pass]) -> Iterable[Finding]:
        first = sampled[0]
        left = first.dataset_len - first.num_samples
        if left <= 0 or not first.exhausted or _drawn_apart(run, first):
            return
        cut = next((w for w in first.dataset_lines if CUT.search(w.text)), None)
        yield self.finding(
            f"the data is sharded twice: each rank holds other samples, and the sampler deals it only one in {run.world_size} of its own",
            where=cut or first.made_sampler,
            ranks=run.rank_ids,
            notes=[
                *([f"this line cuts the rank's share; the sampler cuts again at {first.made_sampler.place}"] if cut and first.made_sampler else []),
                f"rank {first.rank} draws {first.num_samples} of its {first.dataset_len} samples in an epoch; no two ranks share a sample",
            ],
            help="drop one of the two: all records to the dataset of every rank, or a plain shuffling loader (a sampler with num_replicas=1, rank=0)",
            severity=self.severity if cut else Severity.WARNING,
        )


def _place(run: Run, one: Pass) -> tuple[int, int]:
    """(size, rank) of the process group that this rank is in when the pass begins: it may join a smaller one, or be another rank of the next."""
    recording = run.ranks[one.rank]
    joined = [e for e in recording.of("pg") if e["done"] and e.t_ns <= one.opened.t_ns] if recording is not None else []
    if len({(e["world_size"], e["rank"]) for e in joined}) < 2:
        return run.world_size, one.rank
    return number(joined[-1]["world_size"]), number(joined[-1]["rank"])


def _cut_by_rank(run: Run, wrong: list[Pass]) -> bool:
    """The sampler deals each rank the whole of the data, and of each batch its part goes through the model."""
    whole = all(_replicas(p) == 1 and number(p.opened["batch_size"]) for p in wrong)
    return whole and all(0 < together.rows_fed(run, p.rank) * run.world_size <= number(p.opened["batch_size"]) for p in wrong)


def _own_data(run: Run, sampled: list[Pass]) -> bool:
    """Each rank's data set holds other samples: by content, or (where samples are augmented) by a list of its elements."""
    groups = [g for g in passes.aligned(run, sampled)[:8] if len({p.dataset_len for p in g}) == 1]
    if not groups:
        return False
    if contents_of([p for g in groups for p in g[: passes.MAX_COMPARED] if p.key == groups[0][0].key]).apart:
        return True
    first = groups[0][0]
    tables = [t for r in run.present if (t := passes.attributes(r, str(first.opened["dataset"])))]
    if len(tables) < len(run.present) or first.distributed is None or _replicas(first) == run.world_size:
        return False
    entries = [[t.get(name) for t in tables] for name in tables[0]]
    whole = [e for e in entries if all(isinstance(v, list) and len(v) >= 3 and v[2] == first.dataset_len for v in e)]
    return any(len({repr(v[1]) for v in e if v}) == len(e) for e in whole)


def _drawn_apart(run: Run, first: Pass) -> bool:
    """The script drew, before it trained, at least a number for each sample, and other numbers on each rank: toy data, made without a seed."""
    told = [next((e["drawn"] for e in r.of("dataset") if e["kind"] == first.opened["dataset"]), None) for r in run.present]
    drawn = [d for d in told if isinstance(d, list) and len(d) == 3]
    return bool(drawn) and min(number(d[1]) for d in drawn) >= first.dataset_len and len({repr(d[2]) for d in drawn}) > 1


def _replicas(one: Pass) -> int:
    return number((one.distributed or {}).get("num_replicas"))


def _rank(one: Pass) -> int:
    return number((one.distributed or {}).get("rank"), -1)


def _one_a_rank(wrong: list[Pass]) -> list[Pass]:
    return list({p.rank: p for p in reversed(wrong)}.values())[::-1]


def _covers_in_turn(sampled: list[Pass]) -> bool:
    """More virtual shards than ranks: together the ranks' samplers take every share, none twice in one turn."""
    total = max(_replicas(p) for p in sampled)
    shares = {(_rank(p)) for p in sampled if _replicas(p) == total}
    owners = {(_rank(p), p.rank) for p in sampled}
    return shares == set(range(total)) and len(owners) == total and all(_replicas(p) == total for p in sampled)
