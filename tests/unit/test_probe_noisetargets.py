"""Losses that are measured against drawn noise, as the source shows them, and such that are measured against samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.probe import noisetargets


def of(tmp_path: Path, body: str) -> bool:
    path = tmp_path / "train.py"
    path.write_text("def step(model, x, rng, torch, F, t):\n" + "".join(f"    {line}\n" for line in body.splitlines()))
    return noisetargets.any_of(str(path))


@pytest.mark.parametrize(
    "body",
    [
        "noise = torch.randn(32, 8)\nloss = F.mse_loss(model(x + noise), noise)",
        "noise = torch.from_numpy(rng.standard_normal((32, 8)).astype('float32'))\nloss = F.mse_loss(model(x + noise), noise)",
        "eps = torch.randn(8, generator=rng).to(x.device)\ntarget = eps.view(2, 4)\nloss = criterion(model(x + eps), target)",
        "eps, t = torch.randn_like(x), torch.rand(4)\nloss = F.smooth_l1_loss(input=model(x + eps), target=eps[:4])",
        "noise = torch.empty(4).normal_()\nloss = huber(model(x), 0.5 * noise)",
        "loss = F.mse_loss(model(x), torch.randn(4))",
    ],
)
def test_noise(tmp_path: Path, body: str) -> None:
    assert of(tmp_path, body)


@pytest.mark.parametrize(
    "body",
    [
        "noise = torch.randn(32, 8)\nloss = F.mse_loss(model(x + noise), x)",  # the clean samples
        "noisy = x + torch.randn(32, 8)\nloss = F.mse_loss(model(noisy), x)",
        "noisy = x + 0.3 * torch.randn(32, 8)\nloss = F.mse_loss(model(noisy), noisy)",
        "x = x[torch.randint(9, (4,))]\ny = x.sum(1)\nloss = F.mse_loss(model(x), y)",
        "noise = torch.randn(4)\nloss = F.mse_loss(model(x), noise - x)",
    ],
)
def test_samples(tmp_path: Path, body: str) -> None:
    assert not of(tmp_path, body)


def test_without_source() -> None:
    assert not noisetargets.any_of("/none.py") and not noisetargets.any_of("")
