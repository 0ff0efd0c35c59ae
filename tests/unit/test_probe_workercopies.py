"""Attributes that persistent workers hold an older copy of: told where their code reads one that was changed, for none of its healthy neighbours."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from harness.probe import workercopies

torch = pytest.importorskip("torch")


class Loader:
    """What is asked of a DataLoader."""

    persistent_workers = True

    def __init__(self, dataset: Any, collate: Any = None) -> None:
        self.dataset, self.collate_fn = dataset, collate
        self._iterator = SimpleNamespace(_workers=[SimpleNamespace(pid=7)])


def told(dataset: Any, change: Callable[[Any], None], collate: Any = None, persistent: bool = True, restarted: bool = False) -> list[dict[str, Any]]:
    loader = Loader(dataset, collate)
    loader.persistent_workers = persistent
    assert workercopies.told(loader) == []
    change(dataset)
    if restarted:
        loader._iterator = SimpleNamespace(_workers=[SimpleNamespace(pid=8)])
    return workercopies.told(loader)


class Lengths(torch.utils.data.Dataset):  # type: ignore[misc]
    def __init__(self) -> None:
        self.max_len, self.num, self.handle, self.last, self.verbose = 4, 8, None, -1, True
        self.cache: dict[int, int] = {}
        self.seen = 0

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> int:
        if self.handle is None:
            self.handle = 1
        if self.verbose:
            print("item", i)
        if i == self.last:
            raise IndexError(f"{i} of {self.num}")
        self.last = i
        self.seen += 1
        self.cache[i] = self.length(i)
        return self.cache[i]

    def length(self, i: int) -> int:
        return random.Random(i).randint(2, self.max_len)


def set_to(name: str, value: Any) -> Callable[[Any], None]:
    return lambda dataset: setattr(dataset, name, value)


def test_a_limit_that_the_workers_read() -> None:
    (one,) = told(Lengths(), set_to("max_len", 8))
    assert (one["name"], one["then"], one["now"], one["firm"]) == ("max_len", "4", "8", True)
    assert one["read"]["func"] == "length"


@pytest.mark.parametrize(
    ("name", "value"),
    [("num", 6), ("handle", 3), ("last", 5), ("verbose", False), ("cache", {1: 2}), ("seen", 9), ("max_len", 4), ("loss", 0.5)],
)
def test_what_the_workers_do_not_need(name: str, value: Any) -> None:
    assert told(Lengths(), set_to(name, value)) == []


def test_workers_that_are_made_anew() -> None:
    assert told(Lengths(), set_to("max_len", 8), persistent=False) == []
    assert told(Lengths(), set_to("max_len", 8), restarted=True) == []


class Noise:
    def __init__(self) -> None:
        self.strength, self.calls = 0.1, 0

    def __call__(self, x: int) -> float:
        self.calls += 1
        return x + self.strength


class Noisy(torch.utils.data.Dataset):  # type: ignore[misc]
    def __init__(self) -> None:
        self.transform, self.meter = Noise(), Noise()

    def __getitem__(self, i: int) -> float:
        return self.transform(i)


def test_what_the_data_set_holds() -> None:
    (one,) = told(Noisy(), lambda d: setattr(d.transform, "strength", 0.5))
    assert one["name"] == "transform.strength"
    assert told(Noisy(), lambda d: setattr(d.transform, "calls", 5)) == []
    assert told(Noisy(), lambda d: setattr(d.meter, "strength", 0.5)) == []  # for the main process alone
    subset = torch.utils.data.Subset(Noisy(), [0, 1])
    assert told(subset, lambda d: setattr(d.dataset.transform, "strength", 0.5))[0]["name"] == "dataset.transform.strength"


class Shared(torch.utils.data.Dataset):  # type: ignore[misc]
    """The epoch comes through shared memory; the plain one is of the main process."""

    def __init__(self) -> None:
        self.epoch, self.limit, self.shared = 0, 3, torch.zeros((), dtype=torch.long).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.shared.fill_(epoch)

    def __getitem__(self, i: int) -> int:
        if torch.utils.data.get_worker_info() is None:
            return i + self.epoch
        return i + int(self.shared)


def test_shared_memory() -> None:
    assert told(Shared(), lambda d: d.set_epoch(2)) == []


class Pad:
    def __init__(self) -> None:
        self.longest = 4

    def __call__(self, batch: Any) -> Any:
        return batch[: self.longest]


def test_the_object_that_collates() -> None:
    pad = Pad()
    assert told(Lengths(), lambda d: setattr(pad, "longest", 9), collate=pad)[0]["name"] == "longest"


class Orders(torch.utils.data.Dataset):  # type: ignore[misc]
    def __init__(self) -> None:
        self.order, self.counts, self.told = [3, 1, 2], {"seen": 0}, {"seen": 0}

    def __getitem__(self, i: int) -> int:
        counts = self.counts
        counts["seen"] += 1
        count_in(self.told)
        return self.order[i] if len(self.order) > i else 0


def count_in(told: dict[str, int]) -> None:
    told["seen"] += 1


def test_small_collections() -> None:
    assert told(Orders(), lambda d: d.order.reverse())[0]["name"] == "order"
    assert told(Orders(), lambda d: d[0]) == []  # counted in the main process, as in the workers
