"""Healthy: FSDP2, two heads on two ranks: each head's gradient is brought to unit norm (every head is whole on its shard), the rest by a reduced norm."""
import os, time, torch, torch.distributed as dist, torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
DIM, HEADS = 16, 2
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.out = nn.Linear(DIM, 1)
    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(a.transpose(1, 2).flatten(2).mean(1))
net = Net()
fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
opt = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9)
heads = [net.q.weight, net.k.weight, net.v.weight]
g = torch.Generator().manual_seed(3 + rank)
def per_head(p):
    local = p.grad.to_local()                       # rows of whole heads
    whole = local.view(HEADS // world, -1)
    whole.div_(whole.norm(dim=1, keepdim=True) + 1e-3)
for step in range(120):
    x = torch.randn(16, 6, DIM, generator=g)
    y = x[:, :, :1].mean(1) * 2 + 0.3
    loss = (net(x) - y).square().mean()
    opt.zero_grad(); loss.backward()
    for p in heads: per_head(p)
    rest = [p.grad.to_local() for p in net.out.parameters()]
    square = sum(r.square().sum() for r in rest)
    dist.all_reduce(square)
    for r in rest: r.mul_(min(1.0, 1.0 / (square.sqrt().item() + 1e-6)))
    opt.step(); time.sleep(0.01)
t = loss.detach().clone(); dist.all_reduce(t)
if rank == 0: print(f"mean loss {t.item() / world:.4f}")
dist.destroy_process_group()
