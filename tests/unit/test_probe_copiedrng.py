"""Generators that a data set holds, as two forked workers would find and leave them; the workers are played here, one after another."""

from __future__ import annotations

import copy
import mmap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from harness.probe import copiedrng

torch = pytest.importorskip("torch")


class Transform:
    def __init__(self, noise: Any) -> None:
        self.noise = noise


class Held:
    """The data set: a generator of its own, one in a transform, one that nobody draws from."""

    def __init__(self) -> None:
        self.rng, self.idle = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
        self.transforms = [Transform(torch.Generator().manual_seed(5))]


Fetch = Callable[[Held, int, int], Any]  # (copy, worker, number of the fetch)


def told(monkeypatch: pytest.MonkeyPatch, fetch: Fetch, init: Callable[[Held, int], Any] = lambda held, worker: None) -> dict[str, Any] | None:
    held, page = Held(), mmap.mmap(-1, copiedrng.BYTES)
    for worker in range(2):
        monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda worker=worker: SimpleNamespace(id=worker))
        own = copy.copy(held)
        own.rng, own.transforms = held.rng.clone_state(), [Transform(held.transforms[0].noise.clone_state())]
        init(own, worker)
        for nth in range(2):
            tell = copiedrng.watch(own, page, 0)
            fetch(own, worker, nth)
            tell(nth)
    return copiedrng.told(held, page, 0, 2)


def draw(generator: Any) -> None:
    torch.rand(2, generator=generator)


def test_a_copy_in_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(monkeypatch, lambda held, worker, nth: draw(held.rng))
    assert found is not None and found["name"] == "rng" and found["workers"][0] == found["workers"][1]
    assert len(set(found["workers"][0])) == 3
    inside = told(monkeypatch, lambda held, worker, nth: draw(held.transforms[0].noise))
    assert inside is not None and inside["name"] == "transforms.noise"


def test_a_generator_of_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(monkeypatch, lambda held, worker, nth: draw(held.rng), lambda held, worker: held.rng.manual_seed(100 + worker))
    assert found is not None and found["workers"][0][0] != found["workers"][1][0]


def test_seeded_for_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(monkeypatch, lambda held, worker, nth: draw(held.rng.manual_seed(10 * worker + nth)))
    assert found is not None and found["workers"][0][1] != found["workers"][1][1]
    same = told(monkeypatch, lambda held, worker, nth: draw(held.rng.manual_seed(9)))
    assert same is not None and [row[2] for row in same["workers"]] == [0, 0]  # the second fetch left it as it was


def test_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    once = told(monkeypatch, lambda held, worker, nth: draw(held.rng) if not nth else None)  # a list that all workers shuffle alike
    assert once is not None and [row[2] for row in once["workers"]] == [0, 0]
    assert told(monkeypatch, lambda held, worker, nth: None) is None


def test_whether_a_batch_is_fetched_in_one_call() -> None:
    class Batches(Held):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return indices

    class OneByOne(Held):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [self[i] for i in indices]

        def __getitem__(self, index: int) -> int:
            return index

    subset = torch.utils.data.Subset
    assert not copiedrng.batched(OneByOne())
    assert copiedrng.batched(Batches()) and copiedrng.batched(subset(Batches(), [0, 1]))
    assert not copiedrng.batched(Held()) and not copiedrng.batched(subset(subset(Held(), [0, 1]), [0]))
