"""Slurm: submission to first step and to the end, `harness run --launcher slurm` against a bare `sbatch` of `srun torchrun`, pair by pair.

    python scripts/bench/slurm.py [PAIRS [NODES [RANKS A NODE]]]

Speaks with the cluster that SLURM_CONF names, else with one of its own (scripts/slurm-dev-cluster; root). The bare side ends when squeue no longer lists the
job, looked for every 0.1 s; ours ends with the verdict.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import HARNESS, ROOT, TORCHRUN, machine, ratio
from whole import FIRST_STEP

DEV_CLUSTER = ROOT / "scripts" / "slurm-dev-cluster"
BARE = """#!/bin/bash
#SBATCH --nodes={nodes} --ntasks-per-node=1 --cpus-per-task={ranks} --time=10 --output=bare-%j.log
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --cpus-per-task={ranks} {torchrun} --nnodes={nodes} --nproc-per-node={ranks} --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID \\
  --rdzv-endpoint=$head:$((20000 + SLURM_JOB_ID % 10000)) train.py
"""


def first_step(stamp: Path, begun: float) -> float:
    taken = float(stamp.read_text().split()[0]) - begun
    stamp.unlink()
    return taken


def bare(folder: Path, stamp: Path) -> tuple[float, float]:
    begun = time.time()
    job = subprocess.run(["sbatch", "--parsable", "job.sh"], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
    while subprocess.run(["squeue", "-h", "-j", job, "-t", "PD,R,CG"], capture_output=True, text=True).stdout.strip():
        time.sleep(0.1)
    ended = time.time() - begun
    return first_step(stamp, begun), ended


def ours(folder: Path, stamp: Path, nodes: int, ranks: int) -> tuple[float, float]:
    begun = time.time()
    words = [HARNESS, "run", "train.py", "--launcher", "slurm", "--nodes", str(nodes), "-n", str(ranks), "--fail-on", "never"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    ended = time.time() - begun
    if not stamp.exists():
        raise SystemExit(f"no first step: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return first_step(stamp, begun), ended


def compare(pairs: int, nodes: int, ranks: int) -> None:
    mine, theirs = [], []
    with tempfile.TemporaryDirectory() as place:
        folder, stamp = Path(place), Path(place) / "stamp"
        os.environ.update(BENCH_STAMP=str(stamp), OMP_NUM_THREADS="1")
        (folder / "train.py").write_text(FIRST_STEP)
        (folder / "job.sh").write_text(BARE.format(nodes=nodes, ranks=ranks, torchrun=TORCHRUN))
        for _ in range(pairs):
            theirs.append(bare(folder, stamp))
            mine.append(ours(folder, stamp, nodes, ranks))
    for number, what in enumerate(("submission to third step", "submission to verdict / to the end of the job")):
        print(ratio(f"Slurm {nodes} x {ranks}, {what}", [m[number] for m in mine], [t[number] for t in theirs], 1.0))


def main(pairs: int = 3, nodes: int = 2, ranks: int = 2) -> None:
    print(machine())
    if "SLURM_CONF" in os.environ:
        return compare(pairs, nodes, ranks)
    with tempfile.TemporaryDirectory(prefix="hs", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        subprocess.run([DEV_CLUSTER, "start", "--dir", folder, "--nodes", str(nodes)], check=True, stdout=sys.stderr)
        os.environ["SLURM_CONF"] = f"{folder}/etc/slurm.conf"
        try:
            compare(pairs, nodes, ranks)
        finally:
            subprocess.run([DEV_CLUSTER, "stop", "--dir", folder], check=False, stdout=sys.stderr)
    return None


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
