"""The script into which faults are put: a small training of 2 gloo ranks with all the moments a fault can choose."""

from __future__ import annotations

TEMPLATE = '''\
import ctypes, os, queue, signal, sys, threading, time
RANK = int(os.environ["RANK"])


def here():
    """Tells the test that the moment has come; the bound of the verdict counts from now."""
    with open(f"here{RANK}", "w") as file:
        file.write(str(time.time_ns()))


# @start
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
# @rendezvous
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(RANK)
for step in range(6):
    x = torch.randn(16, 8, generator=generator)
    opt.zero_grad()
    loss = model(x).pow(2).mean()
    if step == 3:
        pass
        # @step
    loss.backward()
    opt.step()
model.eval()
with torch.no_grad():
    total = model.module(x).pow(2).sum()
    # @evaluation
    dist.all_reduce(total)
# @saving
if RANK == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.barrier()
# @teardown
dist.destroy_process_group()
# @end
'''
MOMENTS = ("start", "rendezvous", "step", "evaluation", "saving", "teardown", "end")
CULPRIT_MARK = "# culprit"


def script(when: str, what: str, guard: str = "RANK == 1") -> str:
    """The training with `what` at the moment `when`, for the ranks that `guard` names. The whole script where `when` is empty."""
    if not when:
        return what
    lines = []
    for line in TEMPLATE.splitlines():
        if line.strip() == f"# @{when}":
            indent = line[: len(line) - len(line.lstrip())]
            lines += [f"{indent}if {guard}:", f"{indent}    here()", *(f"{indent}    {each}" for each in what.splitlines())]
        elif line.strip() not in {f"# @{moment}" for moment in MOMENTS}:
            lines.append(line)
    return "\n".join(lines) + "\n"


def culprit_line(source: str) -> int:
    """Number of the line that bears the mark; 0: no line is expected."""
    return next((number for number, line in enumerate(source.splitlines(), 1) if line.endswith(CULPRIT_MARK)), 0)
