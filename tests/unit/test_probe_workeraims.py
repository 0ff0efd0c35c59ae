"""Targets that losses keep, and whether a worker takes something by its number."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.probe.sensors import workeraims


def test_targets_under_a_loss() -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    x, y, classes = torch.randn(6, 3, requires_grad=True), torch.randn(6, 3), torch.arange(6) % 3
    (kept,) = workeraims.kept_targets(functional.mse_loss(x, y))
    assert torch.equal(kept, y)
    (kept,) = workeraims.kept_targets(functional.cross_entropy(x, classes))
    assert torch.equal(kept, classes)
    both = list(workeraims.kept_targets(functional.mse_loss(x, y) + 0.5 * functional.cross_entropy(x, classes)))
    assert len(both) == 2 and None not in both
    assert list(workeraims.kept_targets(((x - y) ** 2).mean())) == []
    assert list(workeraims.kept_targets(functional.mse_loss(x, x * 2))) == [None]  # it moves with the weights
    assert list(workeraims.kept_targets(y.sum())) == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = targets[rank][idx]", True),
        ("x, y = tasks[rank]", True),
        ("scores[rank] = 1", False),
        ("y = targets[idx]", False),
        ("rank = rank % 2; y = targets[rank]", False),  # it may be the same for all
        ("y = targets[0]", False),
        ("y = targets", False),
    ],
)
def test_taken_by_number(tmp_path: Path, body: str, expected: bool) -> None:
    path = tmp_path / "work.py"
    path.write_text(f"def work(rank, targets, tasks):\n    idx = draw()\n    {body}\n    loss.backward()\n")
    assert workeraims.by_number((str(path), 4, "work")) is expected


def test_no_function_has_no_number(tmp_path: Path) -> None:
    path = tmp_path / "work.py"
    path.write_text("y = targets[rank]\nloss.backward()\n")
    assert not workeraims.by_number((str(path), 2, "")) and not workeraims.by_number(("", 0, ""))
