"""Gathered rows that are taken for the rows of the data set, as the source shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.probe import shardorder


def told(tmp_path: Path, body: str) -> int:
    path = tmp_path / "score.py"
    lines = ["def score(net, data, mine, parts):", "    dist.all_gather(parts, mine)", *(f"    {line}" for line in body.split("; "))]
    path.write_text("\n".join(lines) + "\n")
    found = shardorder.numbered((str(path), 2, "score"))
    return found[1] if found is not None else 0


@pytest.mark.parametrize(
    "body",
    [
        "rows = torch.cat(parts); texts = net(data.text); best = (rows @ texts.t()).argmax(1); return (best == torch.arange(len(data))).float().mean()",
        "rows = torch.cat(parts, dim=0); return ((rows @ net(data.text).T).argmax(1) == torch.arange(len(data)).cuda()).sum()",
        "rows = torch.cat(parts); labels = torch.arange(len(rows)); best = (rows @ data.text.T).argmax(1); return (labels == best).sum()",
    ],
)
def test_row_i_is_taken_for_sample_i(tmp_path: Path, body: str) -> None:
    assert told(tmp_path, body) == 3


@pytest.mark.parametrize(
    "body",
    [
        "rows = torch.stack(parts, 1).flatten(0, 1); best = (rows @ data.text.T).argmax(1); return (best == torch.arange(len(data))).sum()",
        # both gathered: in one order
        "rows = torch.cat(parts); dist.all_gather(others, texts); cols = torch.cat(others); best = (rows @ cols.T).argmax(1); "
        "return (best == torch.arange(len(rows))).sum()",
        "rows = torch.cat(parts); cols = gather_texts(texts); best = (rows @ cols.T).argmax(1); return (best == torch.arange(len(rows))).sum()",
        "rows = torch.cat(parts); best = (rows @ data.text.T).argmax(1); return (best == ids).sum()",  # ids came along
        "rows = torch.cat(parts); rows = rows[order]; best = (rows @ data.text.T).argmax(1); return (best == torch.arange(len(data))).sum()",
        "parts = by_turns(parts); rows = torch.cat(parts); best = (rows @ data.text.T).argmax(1); return (best == torch.arange(len(data))).sum()",
        # in the order in which the samples are dealt out
        "rows = torch.cat(parts); texts = net(data.text[dealt]); best = (rows @ texts.T).argmax(1); return (best == torch.arange(len(data))).sum()",
        "rows = torch.cat(parts); best = (mine @ mine.T).argmax(1); return (best == torch.arange(len(mine))).sum()",
        "rows = torch.cat(parts); return rows.argmax(1)",
    ],
)
def test_healthy_neighbours(tmp_path: Path, body: str) -> None:
    assert told(tmp_path, body) == 0
