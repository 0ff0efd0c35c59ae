"""A training small enough for a test: a linear model by hand-averaged gradients. Its argument says what goes wrong at step 10."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

what, more = [*sys.argv[1:], "", ""][:2]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
draws = torch.Generator().manual_seed(rank)
truth = torch.tensor([[1.0, -2.0, 3.0, 0.5]])
for step in range(40):
    x = torch.randn(16, 4, generator=draws)
    loss = ((model(x) - x @ truth.T) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    if step > 10 and what == "pace":
        time.sleep(float(more))
    if step == 10:
        if rank == 0:
            print("at step 10", flush=True)
        if what == "raise" and rank == 1:
            raise ValueError("boom on rank 1")
        if what == "kill" and rank == 1:
            os.kill(os.getpid(), 9)
        if what == "sleep":
            time.sleep(float(more))
        while what == "wait" and not Path(more).exists():
            time.sleep(0.05)
        if what == "sleep-first" and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
            time.sleep(float(more))
    optimizer.step()
dist.destroy_process_group()
