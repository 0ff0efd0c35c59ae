"""The walks over all objects, in a thread of the probe's, find what is held and disturb nobody who is making a tuple meanwhile."""

from __future__ import annotations

import gc
import operator
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from harness.probe import living, newshapes, stored


def test_what_is_held_by_deques_that_are_not_full() -> None:
    before = stored.look()["unfilled_bytes"]
    growing = deque((bytes(1000) for _ in range(40)), maxlen=100)
    full = deque((bytes(1000) for _ in range(40)), maxlen=40)
    assert stored.look()["unfilled_bytes"] - before == 40_000
    assert len(growing) == len(full)
    assert gc.isenabled()


@pytest.mark.parametrize(("make", "num_bytes"), [
    (lambda: [torch.zeros(250) for _ in range(40)], 40_000),
    (lambda: [np.zeros(125) for _ in range(40)], 40_000),
    (lambda: [(i, np.zeros(125)) for i in range(40)], 40_000),
    (lambda: [{"x": np.zeros(125)} for _ in range(40)], 40_000),
    (lambda: [SimpleNamespace(x=np.zeros(125)) for _ in range(40)], 40_000),
    (lambda: [[0.5 * i + j for j in range(100)] for i in range(40)], 40 * 100 * 32),
    (lambda: {i: [np.zeros(125)] for i in range(40)}, 40_000),
    (lambda: {"name": "x", **{f"a{i}": np.zeros(125) for i in range(39)}}, 0),  # a namespace: its values are not alike
    (lambda: [torch.zeros(250, requires_grad=True) * 2 for _ in range(40)], 0),  # with their graphs
    (lambda: [torch.zeros(40, 250)[i] for i in range(1) for _ in range(40)], 40 * 40_000),
    (lambda: list(torch.zeros(40, 250)), 40_000),  # one storage
])  # fmt: skip
def test_what_python_holds(make: Callable[[], Any], num_bytes: int) -> None:
    before = stored.look()["stored"]
    held = make()
    assert abs(stored.look()["stored"] - before - num_bytes) < 2000
    assert len(held) == 40


def test_nothing_of_the_walk_holds_an_object_afterwards() -> None:
    one = ([1],)
    before = sys.getrefcount(one)
    living.of((list, dict), len, partial(operator.le, 1000))
    assert sys.getrefcount(one) == before


def test_a_tuple_that_is_made_meanwhile_comes_out_whole() -> None:
    """With a list of gc.get_objects() at hand between two lines of Python, one in twenty of these tuples failed."""
    others = [[i] for i in range(100_000)]  # what makes the walk long enough to be interrupted

    def walk() -> None:
        for _ in range(6):
            stored.look()

    thread = threading.Thread(target=walk)
    thread.start()
    lengths = set()
    while thread.is_alive():
        lengths.add(len(tuple(x for x in range(20_000))))
    thread.join()
    assert lengths == {20_000}
    assert len(others) == 100_000


def test_shapes_that_a_layer_has_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newshapes.S, "recorder", SimpleNamespace(disabled=False, errors=0))
    monkeypatch.setattr(newshapes, "_seen", set())
    monkeypatch.setattr(newshapes, "_calls", [0])
    monkeypatch.setattr(newshapes, "MAX_CALLS", 8)
    layer, without = torch.nn.Linear(4, 4), torch.nn.ReLU()
    assert newshapes.count() == [0, 0]
    for num in (2, 3, 3, 5):
        without(layer(torch.zeros(num, 4)))
    assert newshapes.count() == [3, 4]
    for num in range(10, 20):
        layer(torch.zeros(num, 4))
    assert newshapes.count() == [7, 8]
    assert not newshapes._hook


def test_modules_of_torchs_compiler_have_no_table_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = SimpleNamespace(disabled=False, errors=0)
    monkeypatch.setattr(newshapes.S, "recorder", recorder)
    monkeypatch.setattr(newshapes, "_seen", set())
    monkeypatch.setattr(newshapes, "_calls", [0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    newshapes.count()
    scripted(torch.zeros(2, 4))
    torch.nn.Linear(4, 4)(torch.zeros(2, 4))
    assert recorder.errors == 0
    assert newshapes.count() == [1, 1]
    newshapes._hook.pop().remove()
