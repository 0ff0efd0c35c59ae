"""Healthy: optimal-transport pseudo-labels; Sinkhorn iterations under an annealed temperature, the scaling updated in place."""
import os, torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Linear(16, 8))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
gen = torch.Generator().manual_seed(100 + rank)
centers = torch.randn(8, 16, generator=torch.Generator().manual_seed(5)) * 2
TEMPERATURES = [0.5 * 0.95**i for i in range(60)]

def assign(scores):
    """Equal shares of all prototypes over the global batch."""
    n = scores.shape[0] * world
    potential = torch.zeros(scores.shape[1])
    for temperature in TEMPERATURES:
        mass = torch.softmax((scores + potential) / temperature, dim=1).sum(dim=0)
        dist.all_reduce(mass)
        potential.sub_(temperature * torch.log(mass * scores.shape[1] / n + 1e-6))
    return torch.softmax((scores + potential) / TEMPERATURES[-1], dim=1)

for step in range(60):
    kind = torch.randint(0, 8, (32,), generator=gen)
    x = centers[kind] + torch.randn(32, 16, generator=gen)
    logits = model(x)
    with torch.no_grad():
        target = assign(F.normalize(logits, dim=1))
    loss = -(target * F.log_softmax(logits, dim=1)).sum(1).mean()
    opt.zero_grad(); loss.backward(); opt.step()
dist.destroy_process_group()
