"""Accuracies of batches that are averaged with equal weight, as the source of a loop shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.probe import batchmeans


def told(tmp_path: Path, inside: str, behind: str, header: str = "for x, y in loader:") -> int:
    path = tmp_path / "validate.py"
    path.write_text(f"def validate(net, loader):\n    {header}\n        {inside}\n    {behind}\n")
    found = batchmeans.told((str(path), 2, "validate"))
    return found["line"] if found is not None else 0


HITS = "total += (net(x).argmax(1) == y).float().mean()"


@pytest.mark.parametrize(
    ("inside", "behind", "header"),
    [
        (HITS, "return total / len(loader)", "for x, y in loader:"),
        (HITS + ".item()", "accuracy = 100 * total / len(loader)", "for i, (x, y) in enumerate(tqdm(loader)):"),
        (HITS + "; n += 1", "total /= n", "for x, y in loader:"),
    ],
)
def test_averaged_over_batches(tmp_path: Path, inside: str, behind: str, header: str) -> None:
    assert told(tmp_path, inside, behind, header) == 3


@pytest.mark.parametrize(
    ("inside", "behind"),
    [
        ("total += (net(x).argmax(1) == y).sum()", "return total / len(loader.dataset)"),
        (HITS + " * len(y)", "return total / len(loader)"),
        ("total += loss(net(x), y).mean()", "return total / len(loader)"),
        (HITS, "return total / len(loader.dataset)"),
        (HITS, "return total"),
        ("dead += (net.hidden(x) == 0).float().mean()", "return dead / len(loader)"),  # no accuracy
        (HITS + "; n += len(y)", "return total / n"),
    ],
)
def test_healthy_neighbours(tmp_path: Path, inside: str, behind: str) -> None:
    assert told(tmp_path, inside, behind) == 0
