"""Runs long enough that most steps leave no row (probe/sensors/dark.py): counts stay right, nothing is misread, results stay the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import record
from harness.probe import protocol

# two optimizers take turns, a scheduler follows one, each epoch is evaluated: what the probe counts between two rows
SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
data = TensorDataset(torch.randn(160, 6), torch.randint(0, 3, (160,)))
model, critic = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 3)), nn.Linear(6, 1)
optimizer, other = torch.optim.SGD(model.parameters(), lr=1e-2), torch.optim.Adam(critic.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 200)
for epoch in range(40):
    for x, y in DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
        for part in range(70 if (epoch, schedule.last_epoch) == (39, 800) else 1):  # more backwards to a step than a dark one waits for
            if part == 0:
                other.zero_grad()
            critic(x).square().mean().backward()
        other.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in DataLoader(data, batch_size=40))
    model.train()
    print(f"epoch {epoch} accuracy {right / len(data):.3f}")
print("end", [p.sum().item().hex() for p in (*model.parameters(), *critic.parameters())])
"""
NUM_STEPS = 2 * 40 * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    (folder / "train.py").write_text(SCRIPT)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> dict[str, Any]:
    command = [str(Path(sys.executable).with_name("harness")), "run", "train.py", "-n", "1", "--no-reference", "--format", "json=out.json"]
    done = subprocess.run(command, cwd=folder, env={**os.environ}, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return report.get("runs", [report])[0]


@pytest.fixture(scope="module")
def recording(folder: Path, run: dict[str, Any]) -> record.Recording:
    (rec,) = (folder / ".harness").glob("*-train/rec")
    (one,) = [r for r in record.load_recordings(rec) if r.num_rows]
    return one


def test_all_steps_are_counted_and_the_kept_rows_are_there(recording: record.Recording) -> None:
    assert recording.of(protocol.END)[-1]["steps"] == NUM_STEPS
    assert [row.step for row in recording.all_rows()] == [s for s in range(NUM_STEPS) if protocol.kept(s)]
    assert not recording.damage
    assert not recording.of(protocol.PROBE_ERROR)


def test_a_row_after_steps_without_one_tells_of_its_own_step_only(recording: record.Recording) -> None:
    late = [row for row in recording.all_rows() if row.step >= 1024]
    assert {row.num_backward for row in late} == {1}
    assert {row.num_batches for row in late} <= {0, 1}


def test_nothing_is_found_in_it(run: dict[str, Any]) -> None:
    assert [f["code"] for f in run["findings"] if f["severity"] != "advice"] == []


def test_the_result_is_the_same_without_the_probe(folder: Path, run: dict[str, Any]) -> None:
    bare = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, timeout=400, check=True)
    (log,) = (folder / ".harness").glob("*-train/logs/rank0.log")
    assert bare.stdout.splitlines()[-1] in log.read_text()
