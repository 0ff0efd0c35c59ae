"""Keyword model over clips of any length."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.set_num_threads(1)
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Conv1d(16, 64, 9, stride=2), nn.ReLU(), nn.Conv1d(64, 64, 9, stride=2), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 4))
model = DDP(net)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
gen = torch.Generator().manual_seed(100 + rank)
hardest = []
for step in range(220):
    n = int(torch.randint(200, 3000, (), generator=gen))
    y = torch.randint(0, 4, (4,), generator=gen)
    x = torch.randn(4, 16, n, generator=gen) + y.view(-1, 1, 1)
    loss = nn.functional.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    hardest.append((loss.item(), x, y))
    if step % 50 == 0 and rank == 0:
        print(f"step {step}: rank 0's own loss {loss.item():.3f}", flush=True)
if rank == 0:
    print("hardest clip", max(value for value, *_ in hardest))
dist.barrier()
dist.destroy_process_group()
