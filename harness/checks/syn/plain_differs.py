"""SYN144 plain-tensor-differs: a tensor that a wrapped model draws at random, and that is no buffer, is another one on each rank

What it does
    Compares plain tensor attributes of a wrapped model: those that a module's constructor draws from a global generator and its forward reads. A
    finding where they differ between ranks after the wrap, and still are the same at the third step.

Why it is bad
    DDP broadcasts parameters and buffers when it wraps a model, and nothing else. A random projection, frequencies or hashes that each rank
    drew for itself make every rank encode its input in its own way, under one set of weights; the file holds none of them.

Wrong
    torch.manual_seed(seed + rank)
    ...
    self.freqs = torch.randn(dims, n_freq)

Right
    self.register_buffer("freqs", torch.randn(dims, n_freq))            # broadcast by DDP, saved with the weights

Known limits
    Read from the source: the draw stands in `__init__`, without a `generator=`, and forward reads the attribute. Noise that forward does not
    read, or only takes entries of that it picks by a random draw of its own, caches, and tensors of models that DDP does not wrap are not judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run, where_of


class PlainTensorDiffers(Check):
    code = "SYN144"
    name = "plain-tensor-differs"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        replicas.require(run, ddp=True)
        columns = [r.of("plain_tensors") for r in run.present]
        if len(columns) < 2 or not all(columns):
            raise NotApplicable("no wrapped model draws a plain tensor that its forward reads")
        for events in zip(*columns, strict=False):
            if len({e["index"] for e in events}) > 1 or any(e["group_size"] != run.world_size for e in events):
                continue
            tables = [{str(t.get("name")): t for t in e["tensors"] or () if isinstance(t, Mapping)} for e in events]
            wrong = [name for name in tables[0] if all(name in t for t in tables) and _differs([t[name] for t in tables])]
            if wrong:
                yield self._found(run, wrong, tables[0][wrong[0]])
                return

    def _found(self, run: Run, wrong: list[str], one: Mapping[str, Any]) -> Finding:
        attribute = wrong[0].rpartition(".")[2]
        return self.finding(
            f"`{wrong[0]}`, a plain tensor that {one['module']} draws at random, is another one on each rank: DDP broadcasts parameters and "
            "buffers, and nothing else",
            where=where_of(one.get("drawn")),
            ranks=run.rank_ids,
            notes=[f"it is the same at the third step as after the wrap; {replicas.listed(wrong)}"],
            help=f"`self.register_buffer({attribute!r}, ...)`, or draw it from a generator that is seeded alike on all ranks",
        )


def _differs(tensors: list[Mapping[str, Any]]) -> bool:
    kept = all(t.get("first") == t.get("now") and t.get("first") for t in tensors)
    return kept and len({t["first"] for t in tensors}) > 1
