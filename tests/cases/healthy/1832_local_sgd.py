"""Local SGD: no DDP, models averaged every eight steps and at the end."""
import torch
import torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
w = torch.randn(16, 4)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
g = torch.Generator().manual_seed(20 + rank)


@torch.no_grad()
def average():
    for p in model.parameters():
        dist.all_reduce(p)
        p /= world


for step in range(1, 121):
    x = torch.randn(32, 16, generator=g)
    loss = nn.functional.cross_entropy(model(x), (x @ w).argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 8 == 0:
        average()
    if rank == 0 and step % 24 == 0:
        print(f"step {step} loss {loss.item():.4f}")
dist.destroy_process_group()
