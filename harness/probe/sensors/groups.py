"""Process groups that the script makes while it trains.

Event "groups" (at 4, 8, 16, ... of one statement and the same ranks): site, num (groups of it that are still there), steps (in how many steps
they were made), size (ranks in each). A group stays until destroy_process_group(): torch's own table keeps it.
Event "new_group" (before the first 64 calls of the script's own): site, ranks (null: all), local (only its members have to call).
"""

from __future__ import annotations

from typing import Any

from .. import sites
from ..patching import after, before
from ..state import S

FIRST = 4
REMEMBERED = 256
_made: dict[tuple[sites.Site, tuple[int, ...]], list[tuple[int, int]]] = {}  # -> (id of the group, step)
_told: dict[tuple[sites.Site, tuple[int, ...]], int] = {}


def _after_group(group: Any, *args: Any, **kwargs: Any) -> None:
    from torch.distributed import distributed_c10d as c10d

    if not S.steps or not hasattr(group, "size"):
        return  # at start-up, or this rank is not in it
    ranks = tuple(sorted(c10d.get_process_group_ranks(group)))
    key = (sites.here(4), ranks)
    if not key[0][0] or (key not in _made and len(_made) >= REMEMBERED):
        return
    made = _made.setdefault(key, [])
    made.append((id(group), S.steps))
    del made[:-REMEMBERED]
    living = {id(one) for one in c10d._world.pg_map}
    made[:] = [one for one in made if one[0] in living]
    if len(made) >= max(FIRST, 2 * _told.get(key, 0)):
        _told[key] = len(made)
        S.recorder.event("groups", key[0], num=len(made), steps=len({step for _, step in made}), size=len(ranks))


MAX_CALLS = 64
_num_calls = [0]


def _before_group(*args: Any, **kwargs: Any) -> None:
    site = sites.here(4)
    if not site[0] or _num_calls[0] >= MAX_CALLS:
        return
    _num_calls[0] += 1
    ranks = args[0] if args else kwargs.get("ranks")
    told = [int(r) for r in ranks][:4096] if isinstance(ranks, (list, tuple, range)) else None
    S.recorder.event("new_group", site, ranks=told, local=bool(kwargs.get("use_local_synchronization")))


def arm() -> None:
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    if after(c10d, "new_group", _after_group) and before(c10d, "new_group", _before_group):
        dist.new_group = c10d.new_group
