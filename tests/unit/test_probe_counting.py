"""Whether a loop counts on from a number of a checkpoint, as the source shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.probe import counting

LOAD = "opt.load"
COUNTS = {
    "attribute": "class Run:\n    def resume(self):\n        state = torch.load(p)\n        self.step = state['step']\n        self.opt.load(state['opt'])\n"
    "    def train(self, until):\n        while self.step < until:\n            self.step += 1\n",
    "range": "def main():\n    state = torch.load(p)\n    opt.load(state['opt'])\n    start = state['epoch'] + 1\n    for epoch in range(start, 9): f()\n",
    "returned": "def load(opt):\n    state = torch.load(p)\n    opt.load(state['opt'])\n    return state.get('epoch', 0)\ndef main():\n"
    "    first = load(opt)\n    for epoch in range(first, 9): f()\n",
}
SILENT = {
    "second stage": "def main():\n    state = torch.load(p)\n    opt.load(state['opt'])\n    for epoch in range(9): f()\n",
    "shown only": "def main():\n    state = torch.load(p)\n    opt.load(state['opt'])\n    step = state['step']\n    print(step)\n"
    "    for epoch in range(9): f()\n",
    "other name's loop": "def load(opt):\n    state = torch.load(p)\n    opt.load(state['opt'])\n    step = state['step']\n    print(step)\n"
    "def main():\n    step = 0\n    while step < 9:\n        step += 1\n",
    "no count": "def main():\n    state = torch.load(p)\n    opt.load(state['opt'])\n    best = state['best']\n    while best < 9: f()\n",
    "the end alone": "def main():\n    state = torch.load(p)\n    opt.load(state['opt'])\n    n = state['epochs']\n    for epoch in range(n): f()\n",
}


def told(tmp_path: Path, source: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(source)
    line = next(n for n, text in enumerate(source.splitlines(), 1) if LOAD in text)
    return counting.counts_on((str(path), line, ""))


@pytest.mark.parametrize("name", COUNTS)
def test_counts_on(tmp_path: Path, name: str) -> None:
    assert told(tmp_path, COUNTS[name]) == ("step" if name == "attribute" else "epoch")


@pytest.mark.parametrize("name", SILENT)
def test_healthy_neighbours(tmp_path: Path, name: str) -> None:
    assert told(tmp_path, SILENT[name]) == ""


def test_no_source() -> None:
    assert counting.counts_on(("/none.py", 3, "")) == ""
