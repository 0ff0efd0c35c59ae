"""Peak resident memory of the controller itself, over a whole `harness run ddp_cifar --no-reference`."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from pathlib import Path

from figures import HARNESS, machine

BAR_MIB = 80


def peak_mib(pid: int) -> float:
    """VmHWM of one process; 0 once it is gone."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024
    return 0.0


def main() -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen([HARNESS, "run", "ddp_cifar", "--no-reference"], cwd=folder, stdout=subprocess.DEVNULL)
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, peak_mib(process.pid))
            time.sleep(0.01)
    word = "met" if peak <= BAR_MIB else "MISSED"
    print(
        f"| controller of `harness run ddp_cifar --no-reference` | peak {peak:.1f} MiB | bar {BAR_MIB} | {word} | exit {process.returncode} |"
    )


if __name__ == "__main__":
    main()
