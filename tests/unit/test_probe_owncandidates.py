"""Retrieval within the rank's own cut of all rows: read from the source, for none of its healthy neighbours."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from harness.probe import cuts, owncandidates

NUMBERS = count()  # a file is parsed once: each has a name of its own
SCRIPT = """
import torch
import torch.distributed as dist

def collect(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)

{mark}
def recall(net, users, items, folds):
    rank, world = dist.get_rank(), dist.get_world_size()
    share = len(users) // world
    mine = slice(0, 1)
    {body}
    dist.all_reduce(hits)
    return hits.item() / len(users)
"""
CUT = "u, i = users[rank * share:(rank + 1) * share], items[rank * share:(rank + 1) * share]\n    "
HITS = "hits = ((net.users(u) @ net.items(i).t()).argmax(1) == torch.arange(share)).sum()"


def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, mark: str = "@torch.no_grad()") -> str:
    file = tmp_path / f"script{next(NUMBERS)}.py"
    file.write_text(SCRIPT.format(body=body, mark=mark))
    monkeypatch.setattr(cuts, "user_files", lambda: [str(file)])
    lines = file.read_text().splitlines()
    at = owncandidates.look((str(file), lines.index("    dist.all_reduce(hits)") + 1, "recall"), "all_reduce")
    return lines[at[1] - 1].strip() if at is not None else ""


@pytest.mark.parametrize(
    "body",
    [
        CUT + HITS,
        "u, i = users[rank::world], items[rank::world]\n    " + HITS,
        "q, c = net.users(users[rank::world]), net.items(items[rank::world])\n    hits = ((q @ c.T).argmax(1) == torch.arange(share)).sum()",
    ],
)
def test_candidates_of_the_own_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    assert found(tmp_path, monkeypatch, body) == body.splitlines()[-1].strip()


LOOP = """hits = torch.zeros(())
    for n in range(rank, 5, world):
        u, i = users[n * 1000:(n + 1) * 1000], items[n * 1000:(n + 1) * 1000]
        hits += ((net.users(u) @ net.items(i).t()).argmax(1) == torch.arange(1000)).sum()"""


@pytest.mark.parametrize(
    "body",
    [
        CUT + HITS.replace("net.items(i)", "collect(net.items(i))"),  # gathered
        CUT + HITS.replace("net.items(i)", "net.items(items)").replace("arange(share)", "arange(share) + rank * share"),  # every rank has all candidates
        LOOP,  # folds of a size of their own, dealt out
        "u, i = users[:100], items[:100]\n    " + HITS,  # the same on all ranks
        CUT + "hits = (net.users(u).t() @ net.items(i)).diagonal().sum() + torch.arange(3).sum()",  # a sum over rows
        CUT + "hits = (net(u).argmax(1) == i).sum()",  # a classifier
    ],
)
def test_candidates_that_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    assert found(tmp_path, monkeypatch, body) == ""


def test_pairs_within_a_batch_that_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(tmp_path, monkeypatch, CUT + HITS, mark="") == ""
