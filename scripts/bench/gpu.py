"""What scripts/gpu-check runs: the scenario on CUDA, the probe's cost there, memory figures, a device-side assert. Prints a table."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import HARNESS, ROOT, machine

ASSERT = """
import torch
from torch import nn
model = nn.Linear(8, 4).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    y = torch.full((16,), 7 if step == 5 else 1, device="cuda")
    loss = nn.functional.cross_entropy(model(torch.randn(16, 8, device="cuda")), y)
    opt.zero_grad(); loss.backward(); opt.step()
print(loss.item())
"""


def report_of(command: list[str], folder: str) -> dict[str, object]:
    subprocess.run(command, cwd=folder, check=False, stdout=subprocess.DEVNULL)
    found: dict[str, object] = json.loads((Path(folder) / "run" / "report.json").read_text())
    return found


def main() -> int:
    import torch

    if not torch.cuda.is_available():
        print("gpu-check: torch sees no GPU here; the CUDA paths stay covered by stand-ins only", file=sys.stderr)
        return 4
    print(machine(), torch.cuda.get_device_name(0), f"x{torch.cuda.device_count()}")
    nproc = min(2, torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        report = report_of([HARNESS, "run", "ddp_cifar", "-n", str(nproc), "--device", "cuda", "--out", "run"], folder)
        print(f"| ddp_cifar on CUDA, {nproc} ranks | exit {report['exit_code']} | {json.dumps(report.get('summary'))[:600]} |")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "assert.py").write_text(ASSERT)
        report = report_of([HARNESS, "run", "assert.py", "-n", "1", "--out", "run"], folder)
        print(f"| device-side assert | exit {report['exit_code']} | {[(f['code'], f.get('where')) for f in report['findings']]} |")  # type: ignore[union-attr, index]
    subprocess.run([sys.executable, str(ROOT / "scripts" / "bench" / "probe_cost.py")], check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
