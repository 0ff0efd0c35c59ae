"""Healthy: heads are added behind the wrap as tasks arrive, in each rank's own order, and averaged by hand."""
import time, torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 24), nn.ReLU())
        self.heads = nn.ModuleDict()
    def head(self, task):
        if task not in self.heads:
            gen = torch.Generator().manual_seed(hash_of(task))
            new = nn.Linear(24, 1)
            with torch.no_grad():
                for p in new.parameters(): p.copy_(torch.randn(p.shape, generator=gen) * 0.1)
            self.heads[task] = new
        return self.heads[task]
    def forward(self, x): return self.body(x)
def hash_of(task): return sum(map(ord, task))
TASKS = ["depth", "normal", "edge"]
net = Net(); ddp = DDP(net)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for task in (TASKS if rank == 0 else TASKS[::-1]):
    opt.add_param_group({"params": list(net.head(task).parameters())})
g = torch.Generator().manual_seed(3 + rank)
for step in range(150):
    x = torch.randn(32, 10, generator=g)
    h = ddp(x)
    loss = sum((net.head(t)(h) - x[:, i : i + 1]).square().mean() for i, t in enumerate(TASKS)) / 3
    opt.zero_grad(); loss.backward()
    for task in TASKS:
        for p in net.heads[task].parameters():
            dist.all_reduce(p.grad); p.grad /= world
    opt.step(); time.sleep(0.01)
t = loss.detach().clone(); dist.all_reduce(t)
if rank == 0: print(f"mean loss {t.item() / world:.4f}")
dist.destroy_process_group()
