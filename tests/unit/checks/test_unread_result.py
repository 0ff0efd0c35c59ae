"""Whether a reduction's result is read, as the source shows it, and EVL124 on what the sensor tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builder import event, findings, recording, row, run, site

from harness.checks.evl.unread_result import ReducedAndNeverRead
from harness.probe import unreadresults
from harness.record import Run

METER = """import torch
import torch.distributed as dist
import time


class Meter:
    def __init__(self):
        self.total = self.weight = 0.0

    def join(self, device=None):
        {}

    @property
    def value(self):
        return self.total / self.weight
"""
FUNCTION = """import torch
import torch.distributed as dist
import time


def mean(total, count, loader=None, buffer=None):
    {}
"""


def told(tmp_path: Path, form: str, source: str) -> dict[str, Any] | None:
    file = tmp_path / f"train{abs(hash(form + source))}.py"
    file.write_text(form.format(source.replace("\n", "\n        " if form is METER else "\n    ")))
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if "dist.all_reduce(" in text)
    return unreadresults.told((str(file), line, ""), "all_reduce")


@pytest.mark.parametrize(
    "source, names",
    [
        ("pair = torch.tensor([self.total, self.weight])\ndist.all_reduce(pair)\nreturn self", ["self.total", "self.weight"]),
        ("pair = torch.tensor([self.total])\npair = pair.to(device)\ndist.all_reduce(pair, op=dist.ReduceOp.SUM)", ["self.total"]),
        ("pair = torch.zeros(2)\npair[0] = self.total\npair[1] = 1\ndist.all_reduce(pair)\ndel pair", ["self.total"]),
        ("dist.all_reduce(torch.stack([self.total, self.weight]).cuda())", ["self.total", "self.weight"]),
    ],
)
def test_meters_that_keep_their_own(tmp_path: Path, source: str, names: list[str]) -> None:
    found = told(tmp_path, METER, source)
    assert found is not None and found["names"] == names and "return self.total" in found["used"]["text"]


@pytest.mark.parametrize(
    "source",
    [
        "t = torch.tensor([total, count])\ndist.all_reduce(t)\nreturn total / count",
        "t = torch.tensor(total)\nc = torch.tensor(count)\ndist.all_reduce(t)\ndist.all_reduce(c)\nreturn total / count",
        "dist.all_reduce(total.clone())\nprint(total)",
        "for name, value in total.items():\n    t = torch.tensor(value)\n    dist.all_reduce(t)\nreturn total",
        "t = torch.as_tensor([total, count])\ndist.all_reduce(t)\nreturn total / count",
    ],
)
def test_functions_that_go_on_with_their_own(tmp_path: Path, source: str) -> None:
    assert told(tmp_path, FUNCTION, source) is not None


@pytest.mark.parametrize(
    "source",
    [
        "pair = torch.tensor([self.total, self.weight])\ndist.all_reduce(pair)\nself.total, self.weight = pair.tolist()",
        "pair = torch.tensor([self.total, self.weight])\ndist.all_reduce(pair)\nreturn pair",
        "pair = torch.tensor([self.total, self.weight])\nself.joined = pair\ndist.all_reduce(pair)",
        "pair = self.joined = torch.tensor([self.total, self.weight])\ndist.all_reduce(pair)",
        "self.joined = torch.tensor([self.total, self.weight])\ndist.all_reduce(self.joined)",
        "pair = self.total.detach()\ndist.all_reduce(pair)",
        "pair = self.total.view(-1)\ndist.all_reduce(pair)",
        "pair = torch.as_tensor(self.total)\ndist.all_reduce(pair)",
        "dist.all_reduce(self.total.data)",
        "dist.all_reduce(self.total)",
        "torch.stack([self.total], out=self.weight)\ndist.all_reduce(torch.stack([self.total], out=self.weight))",
        "pair = torch.tensor([self.total])\nwork = dist.all_reduce(pair, async_op=True)\nwork.wait()",
        "ready = torch.tensor([self.total])\ndist.all_reduce(ready)\nrows = [None]\ndist.all_gather_object(rows, self.total)",
        "pair = torch.tensor([self.total])\ndist.all_reduce(pair)\nprint(locals())",
        "pair = torch.tensor([self.total])\ndist.all_reduce(pair)\nself.total = everywhere(self)",
        "pair = torch.tensor([1.0])\ndist.all_reduce(pair)",
    ],
)
def test_meters_that_are_joined(tmp_path: Path, source: str) -> None:
    assert told(tmp_path, METER, source) is None


@pytest.mark.parametrize(
    "source",
    [
        "dist.all_reduce(torch.zeros(1))\nreturn total / count",  # a barrier
        "dist.all_reduce(torch.tensor([dist.get_rank()]))\nreturn total",
        "rank = dist.get_rank()\nwarm = torch.tensor([float(rank)])\ndist.all_reduce(warm)\nreturn rank",
        "began = time.time()\nx = torch.rand(9)\ndist.all_reduce(x.clone())\nreturn x.sum(), began",
        "t = buffer.clone()\ndist.all_reduce(t)\nreturn buffer.numel() * buffer.element_size()",
        "n = torch.tensor(len(loader))\ndist.all_reduce(n)\nreturn loader",
        "t = torch.tensor(time.time())\ndist.all_reduce(t)\nreturn time.time()",
        "t = torch.tensor([total, count])\ndist.all_reduce(t)",  # and nothing is used on
        "t = torch.tensor([total, count])\ndist.all_reduce(t)\nif dist.get_rank() == 0:\n    print(t)\nreturn total",
        "def shown():\n    return t\nt = torch.tensor([total, count])\ndist.all_reduce(t)\nreturn total, shown",
    ],
)
def test_barriers_benchmarks_and_results_that_are_read(tmp_path: Path, source: str) -> None:
    assert told(tmp_path, FUNCTION, source) is None


def test_what_cannot_be_read(tmp_path: Path) -> None:
    assert unreadresults.told(("", 0, ""), "all_reduce") is None
    assert unreadresults.told((str(tmp_path / "none.py"), 3, ""), "all_reduce") is None
    file = tmp_path / "top.py"
    file.write_text("import torch\nx = 3\nt = torch.tensor([x])\ndist.all_reduce(t)\nprint(x)\n")
    assert unreadresults.told((str(file), 4, ""), "all_reduce") is None  # names of a module may be read from anywhere
    assert unreadresults.told((str(file), 4, ""), "all_gather") is None


def reduced(*calls: list[list[float]], unread: Any = True, kind: str = "reduced") -> Run:
    said = {"names": ["self.total"], "used": site(50, "return self.total")} if unread is True else unread
    own = []
    for rank in range(2):
        events = []
        for nth, before in enumerate(calls):
            one = event(kind, line=45, s=nth, op="all_reduce", reduce="sum", before=before[rank], after=[sum(c) for c in zip(*before, strict=True)], at=nth,
                        unread=said if nth == 0 else None)  # fmt: skip
            one.data["at_t"] = one.t_ns  # type: ignore[index]
            events.append(one)
        own.append(recording(events, [row(0)], rank=rank))
    return run(own)


def test_each_rank_goes_on_with_its_own() -> None:
    (found,) = findings(ReducedAndNeverRead, reduced([[3.0, 9.0], [4.0, 9.0]], [[2.5, 9.0], [3.5, 9.0]]))
    assert (found.code, found.where and found.where.line) == ("EVL124", 45)
    assert "its own self.total" in found.message and "line 50" in found.notes[0] and "2.5, 3.5 by the ranks and made 6 of it" in found.notes[1]
    assert findings(ReducedAndNeverRead, reduced([[3.0], [4.0]], [[2.5], [3.5]], kind="reduced_total"))


def test_numbers_that_are_nobodys_own() -> None:
    assert findings(ReducedAndNeverRead, reduced([[3.0], [4.0]], [[2.5], [3.5]], unread=None)) == []
    assert findings(ReducedAndNeverRead, reduced([[0.0], [1.0]], [[0.0], [1.0]])) == []  # ranks
    assert findings(ReducedAndNeverRead, reduced([[1.0], [1.0]], [[2.0], [2.0]])) == []  # epochs
    assert findings(ReducedAndNeverRead, reduced([[3.0], [4.0]])) == []  # once
    assert findings(ReducedAndNeverRead, run([recording([], [row(0)], rank=r) for r in range(2)])) == []
    for value in ({}, [], "x", {"names": None, "used": 3}):
        findings(ReducedAndNeverRead, reduced([[3.0], [4.0]], [[2.5], [3.5]], unread=value))
