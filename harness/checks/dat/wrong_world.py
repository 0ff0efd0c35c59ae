"""DAT104 sampler-wrong-world: a sampler was made for another world or another rank.

What it does
    Compares `num_replicas` and `rank` of the distributed samplers of training passes with the process group.

Why it is bad
    With too few replicas, or one rank number twice, ranks train on the same samples; with too many, part of the data is never seen.

Wrong
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0)

Right
    sampler = DistributedSampler(dataset)      # asks the process group

Known limits
    Silent where the model is not replicated over the whole world (tensor or pipeline parallel groups have samplers of their own size).
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes, together
from harness.checks.dat.passes import Pass
from harness.model import Finding, Severity
from harness.record import Run


class WrongWorld(Check):
    code = "DAT104"
    name = "sampler-wrong-world"
    severity = Severity.ERROR
    explains = ("DAT102", "DAT109", "DAT113", "DAT114", "EVL104")

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        sampled = [p for p in passes.training(run) if p.distributed is not None]
        if not sampled:
            raise NotApplicable("no training pass over a distributed sampler")
        wrong = [p for p in sampled if _replicas(p) > 0 and (_replicas(p) != run.world_size or _rank(p) != p.rank)]
        if not wrong or _covers_in_turn(sampled):
            return
        first = wrong[0]
        size = _replicas(first) != run.world_size
        told = ", ".join(f"rank {p.rank}: rank {_rank(p)} of {_replicas(p)}" for p in _one_a_rank(wrong)[:8])
        yield self.finding(
            f"the sampler was made for {_replicas(first)} replicas, the process group has {run.world_size}"
            if size
            else f"the sampler of rank {first.rank} was made for rank {_rank(first)}",
            where=first.made_sampler,
            ranks=sorted({p.rank for p in wrong}),
            notes=[f"sampler by rank: {told}"],
            help="leave `num_replicas` and `rank` out, or pass `dist.get_world_size()` and `dist.get_rank()`",
        )


def _replicas(one: Pass) -> int:
    return passes.number((one.distributed or {}).get("num_replicas"))


def _rank(one: Pass) -> int:
    return passes.number((one.distributed or {}).get("rank"), -1)


def _one_a_rank(wrong: list[Pass]) -> list[Pass]:
    return list({p.rank: p for p in reversed(wrong)}.values())[::-1]


def _covers_in_turn(sampled: list[Pass]) -> bool:
    """More virtual shards than ranks: together the ranks' samplers take every share, none twice in one turn."""
    total = max(_replicas(p) for p in sampled)
    shares = {(_rank(p)) for p in sampled if _replicas(p) == total}
    owners = {(_rank(p), p.rank) for p in sampled}
    return shares == set(range(total)) and len(owners) == total and all(_replicas(p) == total for p in sampled)
