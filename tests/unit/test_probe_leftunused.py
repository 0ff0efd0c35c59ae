"""Whether what a statement gives a name is used by nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.probe import leftunused


def told(tmp_path: Path, *lines: str) -> bool:
    path = tmp_path / "save.py"
    path.write_text("\n".join(["def save(net, ema):", *(f"    {line}" for line in lines)]) + "\n")
    return leftunused.told((str(path), 2, "save"))


@pytest.mark.parametrize(
    "lines",
    [
        ("average = ema.state_dict()", "torch.save(raw, 'ema.pt')"),
        ("average = ema.state_dict() if ema else None", "if average is not None:", "    torch.save(raw, 'ema.pt')"),
        ("raw, average = net.state_dict(), ema.state_dict()", "torch.save(raw, 'a.pt')"),
    ],
)
def test_unused(tmp_path: Path, lines: tuple[str, ...]) -> None:
    assert told(tmp_path, *lines)


@pytest.mark.parametrize(
    "lines",
    [
        ("average = ema.state_dict()", "drift = sum((raw[k] - average[k]).norm() for k in raw)"),
        ("drift = distance(net, ema.state_dict())", "print(drift)"),
        ("self.kept = ema.state_dict()", "torch.save(raw, 'a.pt')"),
        ("average = ema.state_dict()", "return average"),
    ],
)
def test_used(tmp_path: Path, lines: tuple[str, ...]) -> None:
    assert not told(tmp_path, *lines)


def test_names_of_a_module_may_be_read_from_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "top.py"
    path.write_text("average = ema.state_dict()\n")
    assert not leftunused.told((str(path), 1, "<module>"))
    assert not leftunused.told(("", 0, ""))
