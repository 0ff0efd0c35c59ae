"""What decides that an accumulating loop steps, as its source shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.probe import stepguards

FLAG = """
def epoch(loader):
    for i, x in enumerate(loader):
        full = (i + 1) % 4 == 0
        loss(x).backward()
        if full:
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (FLAG, 4),
        (FLAG.replace("if full:", "if (i + 1) % 4 == 0:"), 6),
        (FLAG.replace("if full:", "if full and ready:"), 6),
        (FLAG.replace("        if full:\n            optimizer", "        optimizer"), None),
    ],
    ids=["a flag", "a comparison", "two", "none"],
)
def test_where_it_is_decided(tmp_path: Path, text: str, line: int | None) -> None:
    (file := tmp_path / "train.py").write_text(text)
    assert [at[1] for at in stepguards.decided_at(str(file))] == ([line] if line else [])
