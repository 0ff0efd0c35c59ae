"""Whether what is about to be summed up over the ranks is divided by their number already."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.probe import predivided

CODE = """import torch
import torch.distributed as dist

def evaluate(model, world, n):
    acc, loss = model.acc(), model.loss()
    {before}
    dist.all_reduce(stat)
    return stat.tolist()
"""
HELPER = """import torch.distributed as dist

def total(value):
    dist.all_reduce(value)
    return value

def main(world, n):
    num = dist.get_world_size()
    acc = total({first})
    loss = total({second})
"""


@pytest.mark.parametrize(
    ("before", "divided"),
    [
        ("stat = torch.stack([loss, acc]) / world", True),
        ("stat = torch.tensor([loss / world, 100 * acc / dist.get_world_size()], device='cpu')", True),
        ("stat = torch.tensor([loss / world, acc])", False),
        ("stat = torch.stack([loss, acc]); stat /= world", True),
        ("stat = torch.stack([loss, acc]).div_(float(world)).clone()", True),
        ("acc = acc / world\n    stat = acc.detach() * 100", True),
        ("stat = torch.stack([loss, acc])", False),
        ("stat = acc / n", False),
        ("stat = acc / (n // world)", False),  # the mean over the rank's share
        ("share = n // world; stat = acc / share", False),
        ("stat = acc / world; stat = loss * 1", False),
        ("stat = acc / world * n", False),  # a count
    ],
)
def test_divided_before_the_sum(before: str, divided: bool, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(CODE.format(before=before))
    line = next(i for i, text in enumerate(file.read_text().splitlines(), 1) if "all_reduce" in text)
    assert predivided.look((str(file), line, ""), "all_reduce") is divided


@pytest.mark.parametrize(
    ("first", "second", "divided"),
    [("a / num", "b / world", True), ("a / num", "b", False), ("a", "b", False), ("x / num for x in y", "value=b / num", False)],
)
def test_divided_by_all_who_call_the_helper(first: str, second: str, divided: bool, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(HELPER.format(first=first, second=second))
    assert predivided.look((str(file), 4, ""), "all_reduce") is divided


@pytest.mark.parametrize(
    ("after", "line"),
    [
        ("stat.div_(n)", 8),
        ("stat /= n", 8),
        ("x = 1\n    stat = stat / n", 9),
        ("stat.mul_(1 / n)", 8),
        ("stat *= n", 8),
        ("stat /= world", 0),  # the same on all ranks
        ("stat /= 2", 0),
        ("stat /= n\n    stat /= n + 1", 0),  # which of them
        ("acc /= n", 0),
        ("pass", 0),
    ],
)
def test_what_divides_the_sum_behind_it(after: str, line: int, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(CODE.format(before="stat = torch.stack([loss, acc])").replace("    return", f"    {after}\n    return"))
    found = predivided.behind((str(file), 7, "evaluate"), "all_reduce")
    assert found == ((str(file), line, "evaluate") if line else None)
    assert predivided.behind(("", 0, ""), "all_reduce") is None


def test_no_source() -> None:
    assert not predivided.look(("", 0, ""), "all_reduce")
