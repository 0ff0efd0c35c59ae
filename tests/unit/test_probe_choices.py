"""Candidates that each rank chooses for itself before the sum, as the source shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.probe import choices


def told(tmp_path: Path, body: str) -> str:
    path = tmp_path / "tune.py"
    lines = ["def tune(hits, grid, n):", *(f"    {line}" for line in body.split("; "))]
    path.write_text("\n".join(lines) + "\n")
    at = max(n for n, text in enumerate(lines, 1) if "all_reduce(" in text)
    found = choices.look((str(path), at, "tune"), "all_reduce", 0)
    return "" if found is None else f"{found['scores']} {found['chosen']} {found['site']['line']}"


@pytest.mark.parametrize(
    "body",
    [
        "best = hits.argmax(); pair = torch.stack([hits[best], n]); dist.all_reduce(pair); return pair[0] / pair[1], grid[best]",
        "best = int(torch.argmax(hits)); top = hits[best].clone(); dist.all_reduce(top); return top, grid[best]",
        "best = hits.argmin().item(); total = torch.tensor([hits[best]]); dist.all_reduce(total); threshold = grid[best]",
    ],
)
def test_chosen_before_the_sum(tmp_path: Path, body: str) -> None:
    assert told(tmp_path, body) == "hits grid 2"


@pytest.mark.parametrize(
    "body",
    [
        "dist.all_reduce(hits); best = hits.argmax(); pair = torch.stack([hits[best], n]); dist.all_reduce(pair); return grid[best]",
        "dist.all_gather(parts, hits); best = hits.argmax(); pair = hits[best]; dist.all_reduce(pair); return grid[best]",
        "best = hits.argmax(); peak = hits[best]; dist.all_reduce(peak)",  # a maximum, which picks nothing
        "best = hits.argmax(1); right = (best == grid).sum(); dist.all_reduce(right)",  # predictions
        "best = hits.argmax(dim=1); right = hits[best] + grid[best]; dist.all_reduce(right)",
        "best = hits.argmax(); total = n.clone(); dist.all_reduce(total); return grid[best], hits[best]",  # another thing is reduced
    ],
)
def test_healthy_neighbours(tmp_path: Path, body: str) -> None:
    assert told(tmp_path, body) == ""


def test_no_source() -> None:
    assert choices.look(("/none.py", 3, ""), "all_reduce", 0) is None
