"""A function of the script's own that clips gradients, as the source shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.probe.sensors import scaledclips

AGC = """
def clip_(params, ratio):
    for p in params:
        limit, size = p.norm() * ratio, p.grad.norm()
        p.grad.copy_(torch.where(size > limit, p.grad * (limit / size), p.grad))
"""
BY_IF = """
def clip_(params, most):
    norm = torch.norm(torch.stack([p.grad.norm() for p in params]))
    if norm > most:
        for p in params:
            p.grad.mul_(most / norm)
"""
OWN = """
def clip_(params, most):
    norm = torch.norm(torch.stack([p.grad.norm() for p in params]))
    scale = min(1.0, most / norm)
    for p in params:
        if scale < 1:
            p.grad.mul_(scale)
"""
CALL = "\ndef step(loss):\n    scaler.scale(loss).backward()\n    clip_(model.parameters(), 0.1)\n    scaler.step(optimizer)\n"


def told(tmp_path: Path, source: str) -> tuple[int, int] | None:
    path = tmp_path / "train.py"
    path.write_text(source)
    found = scaledclips.clips(str(path))
    return None if found is None else (found[0][1], found[1][1])


@pytest.mark.parametrize(("source", "lines"), [(AGC + CALL, (9, 5)), (BY_IF + CALL, (10, 6)), (AGC, (5, 5)), (OWN + CALL, (11, 7))])
def test_clips(tmp_path: Path, source: str, lines: tuple[int, int]) -> None:
    assert told(tmp_path, source) == lines


@pytest.mark.parametrize(
    "source",
    [
        "def average(params):\n    for p in params:\n        dist.all_reduce(p.grad)\n        p.grad /= world\n",
        "def divide(params, tokens):\n    for p in params:\n        p.grad.div_(tokens)\n",
        "def log(params):\n    return max(p.grad.norm() for p in params)\n",
        BY_IF + CALL.replace("0.1)", "0.1 * scaler.get_scale())"),  # the bound bears the factor as well
        BY_IF.replace("norm > most:", "norm > most * scaler.get_scale():") + CALL,
        BY_IF.replace("(params, most)", "(params, most, loss_scale)").replace("norm > most:", "norm > most * loss_scale:") + CALL,
        "def mask(params):\n    for p in params:\n        p.grad.mul_(p.mask)\n",
    ],
)
def test_healthy_neighbours(tmp_path: Path, source: str) -> None:
    assert told(tmp_path, source) is None
