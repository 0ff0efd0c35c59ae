"""Healthy: functional gradients in one tensor with the loss and a count beside, averaged, then equal noise from a shared generator."""
import time, torch, torch.distributed as dist, torch.nn as nn
from torch.func import functional_call, grad_and_value
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1))
opt = torch.optim.Adam(net.parameters(), lr=0.01)
names = [n for n, _ in net.named_parameters()]
shared, g = torch.Generator().manual_seed(99), torch.Generator().manual_seed(3 + rank)
def objective(params, x, y): return (functional_call(net, params, (x,)) - y).square().sum()
for step in range(150):
    n = 24 + int(torch.randint(0, 16, (1,), generator=g))
    x = torch.randn(n, 10, generator=g); y = x[:, :1] * 2
    grads, value = grad_and_value(objective)({k: v.detach() for k, v in net.named_parameters()}, x, y)
    flat = torch.cat([grads[k].flatten() for k in names] + [value.reshape(1), torch.tensor([float(n)])])
    dist.all_reduce(flat)
    mean = flat[:-2] / flat[-1]
    mean += 0.02 * torch.randn(mean.shape, generator=shared)
    for p, part in zip(net.parameters(), mean.split([p.numel() for p in net.parameters()])):
        p.grad = part.view_as(p).clone()
    opt.step(); time.sleep(0.01)
    if rank == 0 and step % 50 == 49: print(f"step {step} loss {(flat[-2] / flat[-1]).item():.4f}")
dist.destroy_process_group()
