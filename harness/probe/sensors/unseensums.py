"""Losses that were summed over the ranks in place, or are made of such a tensor, and are divided by the number of ranks: see unseensums.py.

Event "unseen_sum" (each backward of the first 16 steps that follows an all_reduce of a tensor with a graph): site, made (the statement that made
the loss), at (the all_reduce), side ("before" | "after": where the division stands, in the graph and in the source alike; empty where there is
none, or the loss comes of other things too), given (backward was handed a gradient, or the loss has a hook), made_up (the source may scale
gradients or the learning rate by the number of ranks).
"""

from __future__ import annotations

from typing import Any

from .. import makeups, sites, sources, unseensums
from ..patching import after, contained
from ..state import S
from . import backward, collectives, metrics, steps, thrown

NUM_STEPS, MAX_KEPT = 16, 16
_summed: list[tuple[int, unseensums.Key, sites.Site, frozenset[str]]] = []  # step, what made it, where, sides of the division


def _reduced(result: Any, *args: Any, **kwargs: Any) -> None:
    tensor = args[0] if args else kwargs.get("tensor")
    node = getattr(tensor, "grad_fn", None)
    if node is None or S.steps >= NUM_STEPS or S.in_backward or kwargs.get("async_op"):
        return
    rest = (args[1:], kwargs)
    if metrics._reduction(*rest) != "sum" or not collectives._group_of(*rest)["world"]:
        return
    frames = sites.stack(4, 3)
    if frames:
        outside = {"after"} if len(frames) > 1 and unseensums.divided_at(frames[1]) else set()
        _summed.append((S.steps, unseensums.key_of(node), frames[0], unseensums.sides(*frames[0][:2]) | outside))
        del _summed[:-MAX_KEPT]


@contained
def _look(loss: Any) -> None:
    own = [one for one in _summed if one[0] == S.steps]
    if not own or S.steps >= NUM_STEPS or getattr(loss, "grad_fn", None) is None or (not loss.is_cpu and thrown.capturing()):
        return
    import torch.distributed as dist

    site = sites.here(4)
    side = unseensums.side(loss, {key for _, key, _, _ in own}, dist.get_world_size())
    S.recorder.event(
        "unseen_sum",
        site,
        made=sites.as_json(sources.loss_made_at(site[0], site[1]) or site),
        at=sites.as_json(own[-1][2]),
        side=side if all(side in sides for _, _, _, sides in own) else "",
        given=S.since.given or bool(loss._backward_hooks),
        made_up=any(makeups.made_up(file) for file in {s[0] for s in (*sites.stack(4), *steps.made_at.values())}),
    )


def arm() -> None:
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    backward.at_backward.append(_look, NUM_STEPS)
    if after(c10d, "all_reduce", _reduced):
        dist.all_reduce = c10d.all_reduce
