"""What hooks on parameters make of gradients, as the sensor tells it, and whether the source may use a scaler's factor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.probe import factoruse
from harness.probe.sensors import leafhooks
from harness.probe.state import S

SCALER = "scaler = torch.amp.GradScaler(init_scale=128.0)\n"


@pytest.mark.parametrize(
    ("source", "used"),
    [
        (SCALER + "scaler.update()\n", False),
        (SCALER + "print(f'scale {scaler.get_scale():.0f}')\nwriter.add_scalar('scale', scaler.get_scale(), step)\n", False),
        (SCALER + "before = scaler.get_scale()\nscaler.update()\nskipped = scaler.get_scale() < before\n", False),
        (SCALER + "limit = 0.1 * scaler.get_scale()\n", True),
        (SCALER + "factor = scaler.get_scale()\nlimit = 0.1 * factor\n", True),
        (SCALER + "clip(model, scaler.get_scale())\n", True),
        (SCALER + "p.register_hook(lambda g: g.clamp(max=0.1 * scaler._scale))\n", True),
        ("scaler = GradScaler(init_scale=args.scale)\n", False),
        ("scaler = GradScaler(init_scale=args.scale)\nclip(args.limit * args.scale)\n", True),
        ("def broken(:\n", True),
    ],
)
def test_source_that_may_use_the_factor(tmp_path: Path, source: str, used: bool) -> None:
    path = tmp_path / "train.py"
    path.write_text(source)
    assert factoruse.in_file(str(path)) is used


def test_hooks_that_read_a_scale() -> None:
    limit, loss_scale, scaler = 0.1, 128.0, SimpleNamespace(get_scale=lambda: 128.0)
    assert not factoruse.by_name(lambda g: g.clamp(-limit, limit))
    assert not factoruse.by_name(lambda g: g.clamp(-limit, limit) if scaler else g)
    assert factoruse.by_name(lambda g: g.clamp(-limit * loss_scale, limit * loss_scale))
    assert factoruse.by_name(partial(lambda g, **more: g, scale=128.0)) and factoruse.by_name(len)


torch = pytest.importorskip("torch")


@pytest.fixture
def sensed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    recorder = SimpleNamespace(event=lambda kind, at, **fields: found.append(fields | {"kind": kind}), disabled=False, errors=0)
    for name, value in (("steps", 0), ("recorder", recorder)):
        monkeypatch.setattr(S, name, value)
    monkeypatch.setattr(leafhooks, "_num", [0])
    monkeypatch.setattr(leafhooks, "_scale", [128.0])
    monkeypatch.setattr(leafhooks, "_watched", lambda param: True)
    monkeypatch.setattr(factoruse, "anywhere", lambda: False)
    yield found


@pytest.mark.parametrize(
    ("hook", "bound"),
    [
        (lambda g: g.clamp(-0.5, 0.5), 0.5),
        (lambda g: g.clamp(max=0.5), 0.5),
        (lambda g: g.copy_(g.clamp(-0.25, 0.5)), 0.5),
        (lambda g: g.clamp(min=0), 0.0),
        (lambda g: -g, 0.0),
        (lambda g: 0.5 * g, 0.0),
        (lambda g: g * (g.abs() < 1), 0.0),
        (lambda g: g / g.norm(), 0.0),
        (lambda g: torch.nan_to_num(g, 0.0, 10.0, -10.0), 0.0),
        (lambda g: None, 0.0),
    ],
)
def test_what_a_hook_cuts_entries_to(sensed: list[dict[str, Any]], hook: Any, bound: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(5))
    leafhooks._register(torch.Tensor.register_hook)(weight, hook)
    (weight * torch.tensor([2.0, -3.0, 0.25, -0.1, 1.0])).sum().backward()
    (one,) = sensed
    assert (one["kind"], one["bound"], one["scale"], one["known"]) == ("leaf_hook", pytest.approx(bound), 128.0, False)


def test_a_hook_after_the_accumulation(sensed: list[dict[str, Any]]) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))

    def cut(p: Any) -> None:
        p.grad.clamp_(-0.5, 0.5)

    leafhooks._register_accumulated(torch.Tensor.register_post_accumulate_grad_hook)(weight, cut)
    (weight * torch.tensor([2.0, -3.0, 0.25])).sum().backward()
    (one,) = sensed
    assert (one["kind"], one["bound"]) == ("accumulated_hook", 0.5) and weight.grad.tolist() == [0.5, -0.5, 0.25]
    leafhooks._scale[0] = 0.0  # no scaler: nothing is copied
    (weight * 2).sum().backward()
    assert len(sensed) == 1
