"""infguards.py: source that may have all ranks agree on gradients that are not finite, and source that does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.probe import cuts, infguards

STEP = """
def train(loader):
    for x in loader:
        scaler.scale(model(x)).backward()
        look()
        scaler.unscale_(optimizer)
        average_gradients()
        scaler.step(optimizer)

check()
train(loader)
"""
LOGGED = "def look(loss):\n    assert math.isfinite(loss)\n"
BEFORE = "def check():\n    assert torch.isfinite(torch.autograd.grad(loss, x)[0])\n"
ASKED = "def fine(params):\n    return all(torch.isfinite(p.grad).all() for p in params)\ndef look():\n    return agreed(fine(params))\n"
OF_LOSS = "def look():\n    if not torch.isfinite(loss.detach()) or math.isnan(loss.item()):\n        clip_grad_norm_(params)\n"
MAPPED = "def look():\n    return all(map(math.isfinite, norms))\n"
NORMED = "def look():\n    norm = clip()\n    if torch.isfinite(norm):\n        scaler.step(optimizer)\n"
KNOWN = "def look():\n    for found in scaler._found_inf_per_device(optimizer).values():\n        dist.all_reduce(found)\n"


@pytest.mark.parametrize(("text", "guarded"), [
    ("", False), (LOGGED, False), (BEFORE, False), (OF_LOSS, False), (MAPPED, True), (ASKED, True), (NORMED, True), (KNOWN, True),
])  # fmt: skip
def test_who_asks_for_inf(text: str, guarded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, source = tmp_path / "train.py", text + STEP
    file.write_text(source)
    monkeypatch.setattr(cuts, "user_files", lambda: [str(file)])
    at = [i for i, line in enumerate(source.splitlines(), 1) if "unscale_" in line or line == "train(loader)"]
    assert infguards.any_guard([(str(file), at[0], "train"), (str(file), at[1], "<module>")]) is guarded


def test_in_doubt_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "user_files", list)
    assert infguards.any_guard([("train.py", 1, "train")]) and infguards.any_guard([])
