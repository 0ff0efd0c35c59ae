"""What all benchmarks share: repeated wall times, their median and spread, and one line that says on what they were measured."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HARNESS = str(Path(sys.executable).with_name("harness"))
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))


def wall_s(command: Sequence[str], *, cwd: str | Path, env: dict[str, str] | None = None, ok: tuple[int, ...] = (0,)) -> float:
    """Wall time of one command; raises where it ends with an unexpected code, so that no failure is timed."""
    begun = time.perf_counter()
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(env or {})}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
    )
    took = time.perf_counter() - begun
    if done.returncode not in ok:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.decode(errors='replace')[-500:]}")
    return took


def told(seconds: Sequence[float]) -> str:
    """median [min-max], n."""
    return f"{statistics.median(seconds):.3f} s [{min(seconds):.3f}-{max(seconds):.3f}], n={len(seconds)}"


def ratio(name: str, ours: Sequence[float], theirs: Sequence[float], bar: float) -> str:
    """One row of the table: both medians, the ratio of the medians, the bar and whether it is met."""
    value = statistics.median(ours) / statistics.median(theirs)
    return f"| {name} | {told(ours)} | {told(theirs)} | {value:.3f} | {bar:g} | {'met' if value <= bar else 'MISSED'} |"


def machine() -> str:
    import torch

    cpu = next(
        (line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "?"
    )
    return (
        f"{os.cpu_count()} cores of {cpu}, Linux {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"load {os.getloadavg()[0]:.1f} at the start"
    )
