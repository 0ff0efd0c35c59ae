"""What the generators of a loader's workers were seeded with, written by each forked worker into a page that it shares with its rank.

Two digests go into one: of the seeds before the first fetch, and after it. They are equal on two ranks where the same was drawn; a dataset
that seeds anew for each sample, by its index, ends the fetch elsewhere.
"""

from __future__ import annotations

import mmap
import random
import struct
import sys
from typing import Any

from . import digests
from .state import mix

MAX_WORKERS = 8
AT, ENTRY = 16, struct.Struct("<3Q")  # the page begins with the flags of loader._fetch
PAGE_BYTES = AT + ENTRY.size * MAX_WORKERS


def now() -> list[int]:
    """What tells the streams of torch's, python's and numpy's generators apart, within a block of draws; 0 where there is none. Reading
    changes nothing."""
    import torch

    numpy = sys.modules.get("numpy")
    state: Any = numpy.random.get_state() if numpy is not None and hasattr(numpy, "random") else None
    return [
        int(torch.initial_seed()) or 1,
        digests.wide(repr(random.getstate()[1][:-1]).encode()),
        digests.wide(bytes(state[1].data)) if isinstance(state, tuple) else 0,
    ]


def tell(page: mmap.mmap, before: list[int], after: list[int]) -> None:
    """In a worker, after its first fetch."""
    from torch.utils.data import get_worker_info

    worker = get_worker_info()
    if worker is not None and worker.id < MAX_WORKERS:
        both = (mix(mix(0, a), b) if a else 0 for a, b in zip(before, after, strict=True))
        ENTRY.pack_into(page, AT + ENTRY.size * worker.id, *both)


def told(page: mmap.mmap, num_workers: int) -> list[list[int]]:
    """In the rank: of each worker [torch, python, numpy]; zeros for one that has fetched nothing."""
    return [list(ENTRY.unpack_from(page, AT + ENTRY.size * w)) for w in range(min(num_workers, MAX_WORKERS))]
