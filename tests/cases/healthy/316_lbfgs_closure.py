"""Full-batch L-BFGS on sharded data: every closure call is a synchronised forward and backward."""
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

# time sequence prediction: sines of many phases, every process holds its part
N, L, T = 24, 40, 8
phase = torch.linspace(0, 2 * math.pi, N + 1)[:N].unsqueeze(1)
waves = torch.sin(torch.arange(L).unsqueeze(0) / T * 2 + phase)
mine = waves[rank::world_size]
assert len(mine) * world_size == N, "equal parts only, the loss is a mean"


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(1, 12)
        self.linear = nn.Linear(12, 1)

    def forward(self, series, future=0):
        h = torch.zeros(series.size(0), 12)
        outputs = []
        for t in range(series.size(1)):
            h = self.cell(series[:, t : t + 1], h)
            outputs.append(self.linear(h))
        for _ in range(future):
            h = self.cell(outputs[-1], h)
            outputs.append(self.linear(h))
        return torch.cat(outputs, 1)


torch.manual_seed(0)
seq = DistributedDataParallel(Sequence())
criterion = nn.MSELoss()
optimizer = torch.optim.LBFGS(seq.parameters(), lr=0.5, max_iter=4, history_size=8)


def closure():
    optimizer.zero_grad()
    out = seq(mine[:, :-1])
    loss = criterion(out, mine[:, 1:])
    loss.backward()
    # L-BFGS decides by this value when to stop: it has to be the same everywhere
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / world_size


for i in range(8):
    loss = optimizer.step(closure)
    if rank == 0:
        print(f"STEP {i} loss {loss.item():.6f}")

with torch.no_grad():
    pred = seq.module(mine[:, :-1], future=10)
    err = criterion(pred[:, : L - 1], mine[:, 1:])
dist.reduce(err, dst=0)
if rank == 0:
    print("test loss:", (err / world_size).item())
dist.destroy_process_group()
