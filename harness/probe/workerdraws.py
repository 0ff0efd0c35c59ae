"""In a forked worker: from which generators it draws for its first samples, told through a page that it shares with its rank.

Counted are the words that a Mersenne Twister gave out: less than one for two samples is a choice for the whole batch, as that of a size in `collate_fn`.
"""

from __future__ import annotations

import mmap
import random
import sys
from typing import Any

from . import copiedrng, datasets, digests, sharedfiles, workerseeds
from .state import S

COPIES_AT = workerseeds.PAGE_BYTES
FILES_AT = COPIES_AT + copiedrng.BYTES
PAGE_BYTES = FILES_AT + sharedfiles.BYTES
NUM_FETCHES = 4
WHOLE = 624  # words of a Mersenne Twister between two of its turns
State = tuple[Any, int] | None  # what stays the same until the next turn, words given out since the last one
page: list[mmap.mmap | None] = [None]  # of the loader whose workers are being started: they inherit it
_fetches = [0]


def fetching(original: Any) -> Any:
    """The flags [torch, python, numpy, the data set's own] of generators drawn from for each sample, seeds (workerseeds.py), copies (copiedrng.py),
    files (sharedfiles.py)."""

    def fetch(self: Any, index: Any) -> Any:
        shared = page[0]
        if shared is None or not S.recorder.disabled or _fetches[0] >= NUM_FETCHES:  # not a worker, or seen enough
            return original(self, index)
        nth = _fetches[0]
        _fetches[0] += 1
        earlier, seeds = _states(self), workerseeds.now() if nth == 0 else []
        tell = copiedrng.watch(getattr(self, "dataset", None), shared, COPIES_AT) if nth < 2 else None
        opened = sharedfiles.watch_fetch(shared, FILES_AT) if nth < 2 else None
        try:
            result = original(self, index)
        finally:
            if opened is not None:
                opened()
        if tell is not None:
            tell(nth)
        if seeds:
            workerseeds.tell(shared, seeds, workerseeds.now())
        least = max(1, len(index) // 2) if hasattr(index, "__len__") else 1
        for position, (a, b) in enumerate(zip(earlier, _states(self), strict=True)):
            if words(a, b) >= least:
                shared[position] = 1
        return result

    return fetch


def words(before: State, after: State) -> int:
    """At least so many were drawn between two states."""
    if before is None or after is None or before == after:
        return 0
    if before[1] < 0:
        return WHOLE  # of a kind that does not tell
    return after[1] - before[1] if before[0] == after[0] else WHOLE - before[1] + after[1]


def _states(fetcher: Any) -> list[State]:
    """States of the generators that a dataset can draw from, in a worker. Reading them changes nothing."""
    import torch

    numpy = sys.modules.get("numpy")
    legacy = numpy.random.get_state() if numpy is not None and hasattr(numpy, "random") else None
    python = random.getstate()[1]
    own = datasets.own_generators(getattr(fetcher, "dataset", None))
    return [
        of_torch(bytes(torch.default_generator.get_state().numpy().data)),
        (hash(python[:-1]), python[-1]),
        None if legacy is None else (hash(bytes(legacy[1].data)), int(legacy[2])),
        (own, -1),
    ]


def of_torch(state: bytes) -> State:
    """By ATen's CPUGeneratorImpl: seed (8 bytes), left (4), seeded (4), next (8), 624 words of 8. One that was just seeded has given out all of no words."""
    left, following = int.from_bytes(state[8:12], sys.byteorder), int.from_bytes(state[16:24], sys.byteorder)
    return digests.wide(state[24 : 24 + 8 * WHOLE]), WHOLE if left == 1 and following == 0 else following
