"""Whether a script uses one entry alone of what it gathers, read from its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.probe import entries

HEAD = "def gather(x):\n    parts = [None] * world\n    dist.all_gather_object(parts, x)\n    "


def used_at(tmp_path: Path, source: str) -> int | None:
    file = tmp_path / f"train{abs(hash(source))}.py"
    file.write_text(HEAD + source)
    found = entries.only_one("all_gather_object", str(file), 3)
    return None if found is None else found[1]


@pytest.mark.parametrize(
    "source, line",
    [
        ("return auc(*parts[0])", 4),
        ("score, label = parts[0]\n    return auc(score, label), len(parts)", 4),
        ("return parts\n\ndef evaluate():\n    mine = gather(x)\n    return auc(*mine[0])", 8),
        ("return parts\n\ndef evaluate():\n    return auc(*gather(x)[0])", 7),
    ],
)
def test_one_entry(tmp_path: Path, source: str, line: int) -> None:
    assert used_at(tmp_path, source) == line


@pytest.mark.parametrize(
    "source",
    [
        "return auc(torch.cat([s for s, _ in parts]))",
        "return parts[0] + parts[1]",
        "parts[rank] = x\n    return torch.cat(parts)",
        "assert parts[0] is not None\n    return merge(parts)",
        "return parts[rank]",
        "a, b = parts\n    return a",
        "return [p for p in parts]",
        "return parts",
        "return parts\n\ndef evaluate():\n    mine = gather(x)\n    return auc(mine)\n\nname = gather(n)[0]",
        "pass",
    ],
)
def test_all_of_them(tmp_path: Path, source: str) -> None:
    assert used_at(tmp_path, source) is None
