"""Whose indices a loader's sampler deals out: told only where it is another data set of another length."""

from __future__ import annotations

from typing import Any

from harness.probe import datasets


class Sampler:
    def __init__(self, dataset: Any, field: str = "dataset") -> None:
        setattr(self, field, dataset)


class Own(Sampler):
    """A sampler of the script's own may keep what it likes."""


Sampler.__module__ = "torch.utils.data.distributed"


class Data(list[int]):
    pass


class Subset:
    def __init__(self, dataset: Any, indices: list[int]) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)


DATA = Data(range(64))


def test_another_set() -> None:
    other = Data(range(16))
    for field in ("dataset", "data_source"):
        assert datasets._dealt([Sampler(other, field)], DATA) == {"kind": "Data", "len": 16, "first": False, "plain": True}
    chosen = datasets._dealt([Sampler(Subset(DATA, list(range(32, 64))))], DATA)
    assert chosen == {"kind": "Subset", "len": 32, "first": False, "plain": False}


def test_samplers_that_are_meant() -> None:
    assert datasets._dealt([Sampler(DATA)], DATA) is None
    assert datasets._dealt([Sampler(Data(range(64)))], DATA) is None  # another object, as long: a wrapper
    assert datasets._dealt([Own(Data(range(16)))], DATA) is None
    assert datasets._dealt([Sampler(None), object()], DATA) is None
    first = datasets._dealt([Sampler(Subset(DATA, list(range(32))))], DATA)
    assert first is not None and first["first"]
