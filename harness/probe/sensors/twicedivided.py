"""Losses that are divided by the number of ranks, or by the batch of all ranks: where the source says so (wholelosses.py), and the graph has the
quotient.

Event "whole_divisor" (each backward of the first 16 steps at a call site whose source divides so): site, kind ("ranks" | "batch"), at (the
statement that divides), value (what the graph divides by; 0: by no such number, or the graph cannot be read), rows (of the batch), given (backward
was handed a gradient, or the loss has a hook), made_up (the source may scale gradients or the learning rate by the number of ranks).
"""

from __future__ import annotations

from typing import Any

from .. import cuts, makeups, quotients, sites, syntax, wholelosses
from ..patching import contained
from ..state import S
from . import backward, scales, steps, thrown

NUM_STEPS, MAX_SITES = 16, 4
TINY = 1e-6
_known: dict[sites.Site, tuple[str, sites.Site] | None] = {}  # backward -> kind, the division


def _read(site: sites.Site) -> tuple[str, sites.Site] | None:
    """Once a call site."""
    if site not in _known:
        if len(_known) >= MAX_SITES or not site[0]:
            return None
        files = cuts.user_files()
        trees = tuple((file, tree) for file in files if (tree := syntax.tree(file)) is not None) if len(files) <= cuts.MAX_FILES else ()
        ranks = wholelosses.by_ranks(site, trees)
        batch = wholelosses.by_whole_batch(site, trees) if ranks is None else None
        _known[site] = ("ranks", ranks) if ranks is not None else ("batch", batch) if batch is not None else None
    return _known[site]


@contained
def _look(loss: Any) -> None:
    if S.steps >= NUM_STEPS or S.group is None or getattr(loss, "grad_fn", None) is None or (not loss.is_cpu and thrown.capturing()):
        return
    site = sites.here(4)
    told = _read(site)
    if told is None:
        return
    import torch.distributed as dist

    scaled = scales.from_scaler(loss)
    base = scaled[1]() if scaled is not None else loss
    value = _divisor(base, told[0], dist.get_world_size()) if base is not None else 0.0
    S.recorder.event(
        "whole_divisor", site, kind=told[0], at=sites.as_json(told[1]), value=value, rows=S.batch_rows, given=S.since.given or bool(loss._backward_hooks),
        made_up=any(makeups.made_up(file, bool(S.ddps)) for file in {s[0] for s in (*sites.stack(4), *steps.made_at.values())}),
    )  # fmt: skip


def _divisor(loss: Any, kind: str, ranks: int) -> float:
    """What a mean is divided by, if it is the number of ranks; what a sum over samples is, if that is so many batches; 0 where a factor of the number of
    ranks stands by."""
    for one in quotients.look(loss, lambda tensor: False) or ():
        mean = one.mean or any(0 < f < 1 and abs(1 / f - round(1 / f)) <= TINY for f in one.below)
        wanted = ranks if kind == "ranks" else ranks * S.batch_rows
        if abs(one.value - wanted) <= TINY and (mean if kind == "ranks" else not one.mean) and not any(_scales(f, ranks) for f in (*one.above, *one.below)):
            return float(one.value)
    return 0.0


def _scales(factor: float, ranks: int) -> bool:
    return abs(factor) >= 1 + TINY and abs(factor / ranks - round(factor / ranks)) <= TINY


def arm() -> None:
    backward.at_backward.append(_look, NUM_STEPS)
