"""In a forked worker: which generators move while it fetches its first samples, told through a page that it shares with its rank."""

from __future__ import annotations

import mmap
import random
import sys
from typing import Any

from . import copiedrng, datasets, digests, workerseeds
from .state import S

COPIES_AT = workerseeds.PAGE_BYTES
PAGE_BYTES = COPIES_AT + copiedrng.BYTES
NUM_FETCHES = 4
page: list[mmap.mmap | None] = [None]  # of the loader whose workers are being started: they inherit it
_fetches = [0]


def fetching(original: Any) -> Any:
    """The flags [torch, python, numpy, the data set's own] of moved generators, seeds (workerseeds.py), copies (copiedrng.py)."""

    def fetch(self: Any, index: Any) -> Any:
        shared = page[0]
        if shared is None or not S.recorder.disabled or _fetches[0] >= NUM_FETCHES:  # not a worker, or seen enough
            return original(self, index)
        nth = _fetches[0]
        _fetches[0] += 1
        earlier, seeds = _states(self), workerseeds.now() if nth == 0 else []
        tell = copiedrng.watch(getattr(self, "dataset", None), shared, COPIES_AT) if nth < 2 else None
        result = original(self, index)
        if tell is not None:
            tell(nth)
        if seeds:
            workerseeds.tell(shared, seeds, workerseeds.now())
        for position, (a, b) in enumerate(zip(earlier, _states(self), strict=True)):
            if a != b:
                shared[position] = 1
        return result

    return fetch


def _states(fetcher: Any) -> list[Any]:
    """States of the generators that a dataset can draw from, in a worker. Reading them changes nothing."""
    import torch

    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None and hasattr(numpy, "random") else None
    return [
        digests.wide(bytes(torch.default_generator.get_state().numpy().data)),
        hash(random.getstate()[1]),
        None if state is None else (bytes(state[1].data), int(state[2])),
        datasets.own_generators(getattr(fetcher, "dataset", None)),
    ]
