"""Gradients by hand, averaged in the background and applied one step late: each optimizer step uses the average of the step before."""
import torch
import torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
w = torch.randn(16, 4)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
g = torch.Generator().manual_seed(90 + rank)
flying = None
for step in range(100):
    x = torch.randn(64, 16, generator=g)
    loss = nn.functional.cross_entropy(model(x), (x @ w).argmax(1))
    opt.zero_grad(set_to_none=True)
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    work = dist.all_reduce(flat, async_op=True)
    if flying is not None:
        earlier, buf = flying
        earlier.wait()
        at = 0
        for p in model.parameters():
            p.grad = (buf[at:at + p.numel()] / world).view_as(p)
            at += p.numel()
        opt.step()
    flying = (work, flat)
    if rank == 0 and step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f}")
flying[0].wait()
dist.destroy_process_group()
