"""Snapshots in one container that are all the live weights: told for the mistake, and for none of its healthy neighbours."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from harness.probe import sites
from harness.probe.sensors import keptlive

torch = pytest.importorskip("torch")
SITE = ("/home/u/train.py", 17, "take")


def run(monkeypatch: pytest.MonkeyPatch, keep: Callable[[Any, Any, int], None], held: Any, models: int = 1) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    nets = [torch.nn.Linear(3, 2) for _ in range(models)]
    state = SimpleNamespace(steps=0, recorder=SimpleNamespace(event=lambda kind, site, **fields: told.append(fields)))
    monkeypatch.setattr(keptlive, "S", state)
    monkeypatch.setattr(keptlive, "_read", {})
    monkeypatch.setattr(keptlive, "_told", set())
    monkeypatch.setattr(keptlive.steps, "weights", lambda: {p.data_ptr() for net in nets for p in net.parameters()})
    monkeypatch.setattr(sites, "user_frame", lambda frame: frame if frame is None or frame.f_code.co_filename == __file__ else sites.user_frame(frame.f_back))
    for step in range(0, 60, 10):
        state.steps = step
        keptlive._at_read.__wrapped__(SITE)
        keep(held, nets[step // 10 % models], step)
    return told


def append(held: Any, net: Any, step: int) -> None:
    held.append({k: v.detach().cpu() for k, v in net.state_dict().items()})


def by_number(held: Any, net: Any, step: int) -> None:
    held[step] = net.state_dict()


def with_a_number(held: Any, net: Any, step: int) -> None:
    held.append((step, net.state_dict()))


@pytest.mark.parametrize(("keep", "held"), [(append, deque(maxlen=3)), (append, []), (by_number, {}), (with_a_number, [])])
def test_live_weights_over_and_over(monkeypatch: pytest.MonkeyPatch, keep: Any, held: Any) -> None:
    (one,) = run(monkeypatch, keep, held)
    assert one["num"] == 2 and one["steps"] == [0, 10]


def cloned(held: Any, net: Any, step: int) -> None:
    held.append({k: v.clone() for k, v in net.state_dict().items()})


def best_only(held: Any, net: Any, step: int) -> None:
    held[:] = [net.state_dict()]


def by_name(held: Any, net: Any, step: int) -> None:
    held.update(model=net.state_dict(), same=net.state_dict())


def parameters(held: Any, net: Any, step: int) -> None:
    held.append(dict(net.named_parameters()))


@pytest.mark.parametrize(
    ("keep", "held", "models"),
    [(cloned, [], 1), (best_only, [], 1), (by_name, {}, 1), (parameters, [], 1), (append, deque(maxlen=2), 2), (append, deque(maxlen=1), 1)],
)
def test_healthy_neighbours(monkeypatch: pytest.MonkeyPatch, keep: Any, held: Any, models: int) -> None:
    assert run(monkeypatch, keep, held, models) == []


def test_several_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handed out alike, to look at what is being trained."""

    def handed_out(held: Any, net: Any, step: int) -> None:
        held[:] = [net.state_dict()]
        for _ in range(2):
            keptlive._at_read.__wrapped__(SITE)
            held.append(net.state_dict())

    assert run(monkeypatch, handed_out, []) == []
