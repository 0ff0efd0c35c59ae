"""SYN123 collective-dtype-mismatch: ranks give tensors of different type or size to one collective

What it does
    Compares dtype and number of elements of the n-th collective across ranks.

Why it is bad
    gloo copies bytes: an int32 and a float32 of one size are added as if they were alike, silently; other sizes abort the
    process.

Wrong
    stats = torch.tensor([hits, n])        # int64 on a rank that saw no batch, float32 on the others

Right
    stats = torch.tensor([hits, n], dtype=torch.float64)

Known limits
    Collectives of objects and of subgroups are not compared. NCCL gathers and scatters lists of tensors of unequal size: there only types count.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.syn import pairing
from harness.model import Finding, Severity
from harness.record import Run

UNEVEN = ("all_gather", "reduce_scatter")  # NCCL takes them apart into broadcasts or reductions where sizes differ


class CollectiveDtypeMismatch(Check):
    code = "SYN123"
    name = "collective-dtype-mismatch"
    severity = Severity.ERROR
    explains = ("HNG*", "LAU101", "LAU102")

    def end(self, run: Run) -> Iterable[Finding]:
        pairs = pairing.of(run)
        for n in range(pairs.shortest):
            events = pairs.at(n)
            if len({e["op"] for e in events}) > 1:
                return
            if events[0]["op"] not in pairing.SIZED or any(e["numel"] == -1 for e in events):
                continue
            kinds = [(e["dtype"], e["numel"]) for e in events]
            if len(set(kinds)) > 1 and not (events[0]["op"] in UNEVEN and len({k[0] for k in kinds}) == 1 and _by_nccl(run)):
                if any(e["grad"] for e in events) or pairing.lone(run, pairs) is not None:
                    return  # a pairing gone wrong before: SYN118, SYN122 or OUT101
                i = next(i for i, k in enumerate(kinds) if k != kinds[0])
                what = "dtype" if kinds[i][0] != kinds[0][0] else "size"
                yield self.finding(
                    f"{events[0]['op']} meets tensors of different {what}: {kinds[0][0]} x {kinds[0][1]} on rank {pairs.ranks[0]}, "
                    f"{kinds[i][0]} x {kinds[i][1]} on rank {pairs.ranks[i]}",
                    where=events[i].where,
                    ranks=(pairs.ranks[0], pairs.ranks[i]),
                    notes=[f"collective {n} of the run"],
                    help="give the tensor one dtype and one shape on every rank, whatever the rank has seen",
                )
                return


def _by_nccl(run: Run) -> bool:
    """The default group was made with NCCL, alone or for the GPUs."""
    return any("nccl" in str(e["backend"]) for _, e in run.events("pg") if e["done"])
