"""What the probe costs a step: paired on/off blocks inside one run of 2 gloo ranks, for ResNet-18 and for a tiny model.

Run by hand: `python scripts/bench/probe_cost.py`. It starts itself under the harness, where the probe is armed; each block of steps is timed with the
recorder on and off in alternation, so that a slow moment of the machine hits both. Blocks are short and many, for the same reason. Told is the
median of the pairs' differences and the 95 % interval of that median by order statistics, which asks nothing of how the noise is distributed;
by the clock, and by the CPU time of the thread that trains, which another process on the machine disturbs less.

What the probe adds to a step depends on the model's layers, parameters and batch and not on how long its convolutions take, while the noise of
a step grows with them. So ResNet-18 is measured a second time behind a pooling of its images, which leaves all that the probe reads as it was
and takes most of the computing away: that gives the microseconds, to be held against the whole step. There the recorder goes on and off from step
to step: hundreds of pairs make up for what is left of the noise. The first 256 steps hold 120 pairs: several runs are put together there.
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

# steps a block, batch, pairs of blocks, steps before the first block, pooling. In the first 256 steps each is looked at whole, from the 1,024th on
# one in 64, as in a long run: the median of a long run is that of the other 63, and the first steps tell what the one costs
MODELS = {
    "resnet18": (2, 16, 24, 6, 1),
    "resnet18 of a long run": (2, 16, 24, 1100, 1),
    "resnet18, pooled": (1, 16, 120, 6, 8),
    "resnet18 of a long run, pooled": (1, 16, 600, 1100, 8),
    "tiny": (25, 32, 400, 1100, 1),
}
NUM_RUNS = {"resnet18, pooled": 4}


def rank() -> None:
    import torch
    import torch.distributed as dist
    from training import prepare

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    name = os.environ["BENCH_MODEL"]
    steps, batch, num_pairs, num_warm, pooling = MODELS[name]
    step, x = prepare(name, batch, pooling)
    recorder = sys.modules["_harness_probe.state"].S.recorder

    def block(steps: int, x: torch.Tensor) -> tuple[float, float]:
        dist.barrier()
        begun, computed = time.perf_counter(), time.thread_time()
        for _ in range(steps):
            step(x)
        return (time.perf_counter() - begun) / steps, (time.thread_time() - computed) / steps

    block(num_warm, x[:2, :, :32, :32] if num_warm > 1000 and x.dim() == 4 else x)  # small images on the long way
    seconds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for i in range(2 * num_pairs):
        on = i % 4 in (0, 3)  # on, off, off, on: a drift of the machine cancels
        recorder.disabled = not on
        seconds[on].append(block(steps, x))
    recorder.disabled = False
    if dist.get_rank() == 0:
        Path(os.environ["BENCH_OUT"]).write_text(json.dumps([seconds[True], seconds[False]]))
    dist.destroy_process_group()


def main(names: list[str]) -> None:
    """`names`: of MODELS; all of them where none is given."""
    from figures import HARNESS, machine

    print(machine())
    for name in names or MODELS:
        on: list[list[float]] = []
        off: list[list[float]] = []
        for _ in range(NUM_RUNS.get(name, 1)):
            pairs = measured(name, HARNESS)
            on, off = on + pairs[0], off + pairs[1]
        for clock, what in enumerate(("clock", "CPU of the training thread")):
            print(row(f"{name}, {what}", [pair[clock] for pair in on], [pair[clock] for pair in off]))


def measured(name: str, harness: str) -> tuple[list[list[float]], list[list[float]]]:
    """Blocks with the recorder on and with it off, in order, of one run: [seconds by the clock, of CPU] a step."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        env = {**os.environ, "BENCH_MODEL": name, "BENCH_OUT": str(out)}
        subprocess.run(
            [harness, "run", str(Path(__file__).resolve()), "-n", "2", "--fail-on", "never", "--launcher", "torchrun", "--", "rank"],
            cwd=folder,
            env=env,
            check=False,
            stdout=subprocess.DEVNULL,
        )
        on, off = json.loads(out.read_text())
    return on, off


def row(name: str, on: list[float], off: list[float]) -> str:
    """One line of docs/benchmarks.md."""
    pairs = sorted(a - b for a, b in zip(on, off, strict=True))
    half = round(0.98 * len(pairs) ** 0.5)
    low, center, high = (1e6 * pairs[at] for at in (len(pairs) // 2 - half, len(pairs) // 2, len(pairs) // 2 + half))
    base = 1e6 * statistics.median(off)
    return (
        f"| {name} | {base / 1e3:.3f} ms | {center:.0f} us (95 %: {low:.0f} to {high:.0f}) | {100 * center / base:+.2f} % | "
        f"{base / (base + center):.4f}x | n={len(pairs)} |"
    )


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main(sys.argv[1:])
