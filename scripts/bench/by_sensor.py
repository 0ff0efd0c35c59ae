"""What each part of the probe costs a step of the tiny model: the training thread's own time by module, under cProfile.

Run by hand: `python scripts/bench/by_sensor.py [first | long]` (all 256 first steps, each looked at whole; or steps of a long run). cProfile slows
Python down, so the shares count, and the microseconds only beside the sum; `probe_cost.py` measures what they add up to.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
from pathlib import Path

RUNS = {"first": (6, 250), "long": (1100, 1280)}  # steps before, steps measured: 1,280 are 20 of those that are looked at whole
LEAST = 0.01  # of the whole: parts below it are one row


def rank() -> None:
    import torch
    import torch.distributed as dist
    from training import prepare

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    step, x = prepare("tiny", 32)
    num_warm, num_steps = RUNS[os.environ["BENCH_RUN"]]
    for _ in range(num_warm):
        step(x)
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(num_steps):
        step(x)
    profile.disable()
    if dist.get_rank() == 0:
        Path(os.environ["BENCH_OUT"]).write_text(json.dumps(by_module(profile, num_steps)))
    dist.destroy_process_group()


def by_module(profile: cProfile.Profile, num_steps: int) -> dict[str, tuple[float, float]]:
    """Module of the probe -> (calls, microseconds) a step; what its functions call of torch or Python themselves counts as theirs."""
    table: dict[str, tuple[float, float]] = {}
    for (file, _, _), (_, calls, own_s, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        shares = {file: (calls, own_s)} if _is_probe(file) else {c[0]: (0, parts[2]) for c, parts in callers.items() if _is_probe(c[0])}
        for module, (num, seconds) in shares.items():
            name = module.partition("/harness/probe/")[2]
            before = table.get(name, (0.0, 0.0))
            table[name] = (before[0] + num / num_steps, before[1] + 1e6 * seconds / num_steps)
    return table


def _is_probe(file: str) -> bool:
    return "/harness/probe/" in file


def main(runs: list[str]) -> None:
    from figures import HARNESS, machine

    print(machine())
    for run in runs or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "modules.json"
            subprocess.run(
                [HARNESS, "run", str(Path(__file__).resolve()), "-n", "2", "--fail-on", "never", "--launcher", "torchrun", "--", "rank"],
                cwd=folder,
                env={**os.environ, "BENCH_RUN": run, "BENCH_OUT": str(out)},
                check=False,
                stdout=subprocess.DEVNULL,
            )
            table = json.loads(out.read_text())
        print(f"\n| {run} | calls a step | us a step under cProfile | share |\n|---|---|---|---|")
        print("\n".join(rows(table)))


def rows(table: dict[str, tuple[float, float]]) -> list[str]:
    """Of docs/benchmarks.md, the dearest first."""
    whole = sum(us for _, us in table.values())
    small = [(calls, us) for calls, us in table.values() if us < LEAST * whole]
    named = sorted(((us, calls, name) for name, (calls, us) in table.items() if us >= LEAST * whole), reverse=True)
    lines = [f"| `{name}` | {calls:.1f} | {us:.1f} | {us / whole:.0%} |" for us, calls, name in named]
    lines.append(f"| {len(small)} others | {sum(c for c, _ in small):.1f} | {sum(us for _, us in small):.1f} | {sum(us for _, us in small) / whole:.0%} |")
    return [*lines, f"| all | {sum(c for c, _ in table.values()):.1f} | {whole:.1f} | |"]


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main(sys.argv[1:])
