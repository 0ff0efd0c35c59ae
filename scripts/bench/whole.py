"""`harness run ddp_cifar --no-reference` as a whole against `torchrun scenarios/ddp_cifar.py`, and a second launch against torchrun's."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from figures import HARNESS, ROOT, TORCHRUN, machine, ratio, wall_s

FIRST_STEP = """
import json, os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
p = torch.nn.Parameter(torch.zeros(1))
opt = torch.optim.SGD([p], lr=0.1)
for _ in range(3):
    opt.zero_grad(); p.sum().backward(); opt.step()
    dist.all_reduce(p.data)
if dist.get_rank() == 0:
    with open(os.environ["BENCH_STAMP"], "a") as f:
        f.write(json.dumps(time.time()) + "\\n")
dist.destroy_process_group()
"""


def whole(repeats: int) -> None:
    ours, theirs = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            theirs.append(
                wall_s(
                    [TORCHRUN, "--standalone", "--nproc-per-node", "2", str(ROOT / "scenarios" / "ddp_cifar.py")],
                    cwd=folder,
                    env={"OMP_NUM_THREADS": "1"},
                )
            )
            ours.append(wall_s([HARNESS, "run", "ddp_cifar", "--no-reference"], cwd=folder))
    print(ratio("whole `harness run ddp_cifar --no-reference` / `torchrun`", ours, theirs, 0.8))


def second_launch(repeats: int) -> None:
    """From the end of one script to the third step of the next, in one `harness run a.py b.py c.py "
    "...`, against torchrun's start to there."""
    import time

    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        names = [f"s{i}.py" for i in range(repeats + 1)]
        for name in names:
            (Path(folder) / name).write_text(FIRST_STEP)
        stamp = Path(folder) / "stamps"
        for name in names[:repeats]:
            stamp.unlink(missing_ok=True)
            begun = time.time()
            wall_s(
                [TORCHRUN, "--standalone", "--nproc-per-node", "2", name],
                cwd=folder,
                env={"BENCH_STAMP": str(stamp), "OMP_NUM_THREADS": "1"},
            )
            theirs.append(json.loads(stamp.read_text().split()[0]) - begun)
        stamp.unlink()
        wall_s([HARNESS, "run", *names, "-n", "2", "--out", "runs", "--fail-on", "never"], cwd=folder, env={"BENCH_STAMP": str(stamp)})
        steps = [json.loads(line) for line in stamp.read_text().split()]
        for name, at in zip(names[1:], steps[1:], strict=True):
            report = json.loads((Path(folder) / "runs" / Path(name).stem / "report.json").read_text())
            ours.append(at - report["started_ns"] / 1e9)
    print(ratio("second and later script, launch to third step / `torchrun`", ours, theirs, 0.1))


def main(repeats: int = 5) -> None:
    print(machine())
    whole(repeats)
    second_launch(repeats)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
