"""Rates that come again and again, as the source makes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.probe import cycles


def told(tmp_path: Path, source: str) -> bool:
    path = tmp_path / "train.py"
    path.write_text(source)
    return cycles.in_file(str(path))


@pytest.mark.parametrize(
    "source",
    [
        "def lr_at(step):\n    return cos(pi * (step % period) / period)\n",
        "def train():\n    for step in steps:\n        g['lr'] = base * (1 - (step % 20) / 20)\n",
        "s = LambdaLR(opt, lambda step: 0.5 * (1 + cos(pi * (step % n) / n)))\nlr_scheduler = LambdaLR(opt, lambda step: (step % n) / n)\n",
    ],
)
def test_a_remainder(tmp_path: Path, source: str) -> None:
    assert told(tmp_path, source)


@pytest.mark.parametrize(
    "source",
    [
        "def lr_at(step):\n    return base * min(1.0, step / warm)\n",
        "def train():\n    for step in steps:\n        g['lr'] = lr_at(step)\n        if step % 100 == 0: print(step)\n        k = step % 7\n",
        "def log_lr(step):\n    return 'lr %g' % step\n",
    ],
)
def test_none(tmp_path: Path, source: str) -> None:
    assert not told(tmp_path, source)
