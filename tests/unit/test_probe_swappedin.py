"""Averages that are written into trained weights: what is told of loops that are made by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness.probe import copies, sites, writtenback
from harness.probe.sensors import steps, swappedin
from harness.probe.state import S


class Loop:
    """A model, its average, and steps as the sensors see them."""

    def __init__(self, told: list[dict[str, Any]]) -> None:
        torch.manual_seed(3)
        self.net, self.told = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)), told
        self.params = list(self.net.parameters())
        self.mean = [p.detach().clone() for p in self.params]

    def train(self, num: int, follow: bool = True) -> None:
        for _ in range(num):
            if swappedin._open:
                swappedin._before_step(None)
            S.steps += 1
            with torch.no_grad():
                for p, m in zip(self.params, self.mean, strict=True):
                    p.add_(0.1 * torch.randn_like(p))
                    if follow:
                        m.lerp_(p, 0.1)

    def evaluate(self) -> None:
        with torch.no_grad():
            self.net.eval()(torch.ones(1, 6))
        self.net.train()

    def write(self, values: list[torch.Tensor]) -> None:
        for p, v in zip(self.params, values, strict=True):
            p.data.copy_(v)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    told: list[dict[str, Any]] = []
    recorder = SimpleNamespace(event=lambda kind, site=("", 0, ""), **fields: told.append({"line": site[1]} | fields), disabled=False, errors=0)
    for name, value in (("recorder", recorder), ("steps", 1), ("compiling", False), ("backwards", 0)):
        monkeypatch.setattr(S, name, value)
    for name, empty in (("_asked", {}), ("_watched", []), ("_open", []), ("_told", [0]), ("_off", []), ("_known", [-999, 0, {}])):
        monkeypatch.setattr(swappedin, name, empty)
    monkeypatch.setattr(sites, "is_user_code", lambda code: code.co_filename == __file__)
    monkeypatch.setattr(sites, "_is_user", {})
    monkeypatch.setattr(writtenback, "has_use", lambda name: name.name == "used")
    made = Loop(told)
    monkeypatch.setattr(steps, "_known", {1: SimpleNamespace(current=lambda: made.params)})
    copies.watch("test", swappedin._look)
    yield made
    copies.leave("test")
    assert recorder.errors == 0 and not swappedin._hook


def swap(loop: Loop) -> None:
    kept = [p.detach().clone() for p in loop.params]
    loop.write(loop.mean)
    loop.evaluate()
    assert len(kept) == 4


def swap_and_back(loop: Loop) -> None:
    kept = [p.detach().clone() for p in loop.params]
    loop.write(loop.mean)
    loop.evaluate()
    loop.write(kept)


def swap_and_back_by_data(loop: Loop) -> None:
    kept = [p.data for p in loop.params]
    for p in loop.params:
        p.data = p.data.clone()
    swappedin._known[0] = -999
    loop.write(loop.mean)
    loop.evaluate()
    for p, k in zip(loop.params, kept, strict=True):
        p.data = k
    swappedin._known[0] = -999


def switch(loop: Loop) -> None:
    loop.write(loop.mean)
    loop.evaluate()


def drift(loop: Loop) -> None:
    used = [p.detach().clone() for p in loop.params]
    loop.write(loop.mean)
    loop.evaluate()
    assert len(used) == 4


def lookahead(loop: Loop) -> None:
    loop.write(loop.mean)


def by_load(loop: Loop) -> None:
    raw, average = copy.deepcopy(loop.net.state_dict()), dict(zip(loop.net.state_dict(), loop.mean, strict=True))
    swappedin._before_load(loop.net, average, ("train.py", 7, "by_load"))
    with torch.no_grad():
        loop.net.load_state_dict(average)
    loop.evaluate()
    assert len(raw) == 4


LEFT = {"evaluated": True, "stays": True, "returned": False, "same": True, "follows": 2}


@pytest.mark.parametrize(("swaps", "expected"), [
    (swap, LEFT | {"kept": "kept", "used": False}),
    (by_load, LEFT | {"kept": "raw", "used": False}),
    (switch, LEFT | {"kept": None, "used": False}),
    (drift, LEFT | {"kept": "used", "used": True}),
    (lookahead, {"evaluated": False, "stays": False}),
    (swap_and_back, {"stays": False, "returned": True}),
])  # fmt: skip
def test_what_becomes_of_it(loop: Loop, swaps: Callable[[Loop], None], expected: dict[str, Any]) -> None:
    for _ in range(4):
        loop.train(5)
        swaps(loop)
    loop.train(3)
    swappedin._close()
    assert len(loop.told) == 4 and loop.told[-1].items() >= expected.items()
    assert [t["same"] for t in loop.told] == [False, True, True, True]


def test_a_write_back_by_assignment_is_seen_by_its_values(loop: Loop) -> None:
    for _ in range(3):
        loop.train(5)
        swap_and_back_by_data(loop)
    loop.train(3)
    swappedin._close()
    assert [(t["stays"], t["returned"]) for t in loop.told] == [(False, True)] * 3


def test_what_comes_back_some_steps_later(loop: Loop) -> None:
    for _ in range(3):
        loop.train(5)
        kept = [p.detach().clone() for p in loop.params]
        loop.write(loop.mean)
        loop.evaluate()
        loop.train(4)
        loop.write(kept)
    loop.train(3)
    swappedin._close()
    assert [(t["stays"], t["returned"]) for t in loop.told] == [(True, True)] * 3


def test_a_snapshot_of_the_weights_is_no_average(loop: Loop) -> None:
    for _ in range(3):
        for _ in range(5):
            loop.train(1, follow=False)
            loop.mean = [m.copy_(p.detach()) for m, p in zip(loop.mean, loop.params, strict=True)]
        loop.train(1, follow=False)
        switch(loop)
    loop.train(3, follow=False)
    swappedin._close()
    assert loop.told and not any(t["follows"] for t in loop.told)


def test_weights_of_an_outer_loop_stand_still_between_writes(loop: Loop) -> None:
    for _ in range(3):
        loop.train(5, follow=False)
        for p, m in zip(loop.params, loop.mean, strict=True):
            m.lerp_(p.detach(), 0.5)
        switch(loop)
    loop.train(3, follow=False)
    swappedin._close()
    assert [(t["same"], t["follows"]) for t in loop.told] == [(False, 0), (True, 0), (True, 0)]


def test_training_before_the_evaluation_is_none(loop: Loop) -> None:
    for _ in range(2):
        loop.train(5)
        loop.write(loop.mean)
        loop.net(torch.ones(1, 6))
        S.backwards += 1
        loop.evaluate()
    loop.train(3)
    swappedin._close()
    assert [t["evaluated"] for t in loop.told] == [False, False]


def test_it_ends(loop: Loop) -> None:
    for _ in range(40):
        loop.train(2)
        switch(loop)
    assert len(loop.told) == swappedin.MAX_SAME


def test_a_lazy_part_of_a_model_is_no_trained_one(loop: Loop) -> None:
    both = nn.ModuleList([loop.net, nn.LazyLinear(3)])
    swappedin._before_load(both, {}, (__file__, 1, "f"))
    assert S.recorder.errors == 0


def test_nothing_is_read_in_the_capture_of_a_graph(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.train(3)
    loop.write(loop.mean)
    monkeypatch.setattr(swappedin, "_is_captured", lambda param: True)
    monkeypatch.setattr(swappedin, "bits", lambda tensor: pytest.fail("read"))
    loop.evaluate()
    loop.train(1)
    assert swappedin._open and not swappedin._open[0].evaluated and swappedin._open[0].stays is None
    loop.train(swappedin.MAX_LOOKS)
    assert not swappedin._open


def test_a_look_that_fails_is_the_last(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.train(3)
    loop.write(loop.mean)
    with monkeypatch.context() as patch:
        patch.setattr(swappedin, "bits", lambda tensor: 1 // 0)
        loop.train(2)
    assert S.recorder.errors == 1 and not swappedin._open
    S.recorder.errors = 0
