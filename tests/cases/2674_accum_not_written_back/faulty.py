"""Gradients are accumulated, divided, packed into one tensor, averaged and unpacked by hand."""
import time, torch, torch.distributed as dist, torch.nn as nn
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
g = torch.Generator().manual_seed(3 + rank)
ACCUM = 2
for step in range(120):
    opt.zero_grad()
    for _ in range(ACCUM):
        x = torch.randn(16, 10, generator=g)
        loss = (net(x) - x[:, :1] * 2).square().mean()
        loss.backward()
    grads = [p.grad for p in net.parameters()]
    for gr in grads: gr.div_(ACCUM)
    flat = torch.cat([gr.flatten() for gr in grads])
    dist.all_reduce(flat); flat /= world
    for gr, part in zip(grads, flat.split([gr.numel() for gr in grads])):
        gr = part.view_as(gr)
    opt.step(); time.sleep(0.01)
v = loss.detach().clone(); dist.all_reduce(v)
if rank == 0: print(f"mean loss {v.item() / world:.4f}")
dist.destroy_process_group()
