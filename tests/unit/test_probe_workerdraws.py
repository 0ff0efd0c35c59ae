"""How many words a generator gave out between two states."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from harness.probe import workerdraws


@pytest.fixture(params=[0, 600, 2000])
def drawn_before(request: pytest.FixtureRequest) -> Any:
    """Fresh from its seed, near a turn of the Twister, behind one."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    torch.randint(0, 9, (request.param,))
    for _ in range(request.param):
        random.getrandbits(32)
    np.random.randint(0, 2**32, request.param, dtype=np.uint32)
    return request.param


@pytest.mark.parametrize(
    ("position", "draw"),
    [
        (0, lambda: torch.randint(0, 9, (1,))),
        (1, lambda: random.getrandbits(32)),
        (2, lambda: np.random.randint(0, 2**32, dtype=np.uint32)),
    ],
)
@pytest.mark.parametrize("times", [0, 1, 7, 40])
def test_words_are_counted(drawn_before: int, position: int, draw: Callable[[], Any], times: int) -> None:
    before = workerdraws._states(None)
    for _ in range(times):
        draw()
    after = workerdraws._states(None)
    assert [workerdraws.words(a, b) for a, b in zip(before, after, strict=True)] == [times if at == position else 0 for at in range(4)]


@pytest.mark.parametrize(("per_sample", "flags"), [(0, [0, 0]), (1, [1, 0])])
def test_one_draw_a_batch_is_none_a_sample(monkeypatch: pytest.MonkeyPatch, per_sample: int, flags: list[int]) -> None:
    """torch draws for each sample, or python once for the size of the whole batch."""
    page = bytearray(workerdraws.PAGE_BYTES)
    monkeypatch.setattr(workerdraws, "page", [page])
    monkeypatch.setattr(workerdraws, "_fetches", [1])
    monkeypatch.setattr(workerdraws.S, "recorder", type("Off", (), {"disabled": True})())
    monkeypatch.setattr(workerdraws.copiedrng, "watch", lambda *_: None)

    def fetch(self: Any, index: list[int]) -> int:
        for _ in range(per_sample * len(index)):
            torch.rand(1)
        return random.choice([16, 24, 32])

    workerdraws.fetching(fetch)(object(), list(range(16)))
    assert list(page[:2]) == flags
