"""What the probe costs a step: paired on/off blocks inside one run of 2 gloo ranks, for ResNet-18 and for a tiny model.

Run by hand: `python scripts/bench/probe_cost.py`. It starts itself under the harness, where the probe is armed; each block of steps is timed with the
recorder on and off in alternation, so that a slow moment of the machine hits both.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BLOCKS = 24
MODELS = {"resnet18": (2, 16), "tiny": (200, 32)}  # steps a block, batch


def rank() -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    name = os.environ["BENCH_MODEL"]
    steps, batch = MODELS[name]
    if name == "resnet18":
        from torchvision.models import resnet18

        model, x = DistributedDataParallel(resnet18(num_classes=10)), torch.randn(batch, 3, 64, 64)
    else:
        model, x = DistributedDataParallel(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))), torch.randn(batch, 32)
    y = torch.randint(0, 10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    recorder = sys.modules["_harness_probe.state"].S.recorder

    def block() -> float:
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return (time.perf_counter() - begun) / steps

    for _ in range(3):
        block()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for i in range(2 * BLOCKS):
        on = i % 4 in (0, 3)  # on, off, off, on: a drift of the machine cancels
        recorder.disabled = not on
        seconds[on].append(block())
    recorder.disabled = False
    if dist.get_rank() == 0:
        Path(os.environ["BENCH_OUT"]).write_text(json.dumps([seconds[True], seconds[False]]))
    dist.destroy_process_group()


def main() -> None:
    from figures import HARNESS, machine

    print(machine())
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "seconds.json"
            env = {**os.environ, "BENCH_MODEL": name, "BENCH_OUT": str(out)}
            subprocess.run(
                [HARNESS, "run", str(Path(__file__).resolve()), "-n", "2", "--fail-on", "never", "--launcher", "torchrun", "--", "rank"],
                cwd=folder,
                env=env,
                check=False,
                stdout=subprocess.DEVNULL,
            )
            on, off = json.loads(out.read_text())
        pairs = [a - b for a, b in zip(on, off, strict=True)]
        center, error = statistics.median(pairs), 1.96 * statistics.stdev(pairs) / len(pairs) ** 0.5
        base = statistics.median(off)
        print(
            f"| {name} | step {1e3 * base:.3f} ms without, {1e3 * statistics.median(on):.3f} ms with | "
            f"{1e6 * center:.0f} us a step +- {1e6 * error:.0f} (95 %), {100 * center / base:+.2f} % | throughput "
            f"{base / (base + center):.4f}x, n={len(pairs)} |"
        )


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()
