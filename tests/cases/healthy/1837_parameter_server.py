"""Rank 0 serves the parameters and trains none of its data; rank 1 sends gradients with isend and receives weights with irecv."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
w = torch.randn(16, 4)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
size = sum(p.numel() for p in model.parameters())
STEPS = 100
if rank == 0:
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        buf = torch.empty(size)
        dist.irecv(buf, src=1).wait()
        at = 0
        for p in model.parameters():
            p.grad = buf[at:at + p.numel()].view_as(p).clone()
            at += p.numel()
        opt.step()
        dist.isend(parameters_to_vector(model.parameters()).detach(), dst=1).wait()
else:
    g = torch.Generator().manual_seed(5)
    for step in range(STEPS):
        x = torch.randn(64, 16, generator=g)
        loss = nn.functional.cross_entropy(model(x), (x @ w).argmax(1))
        model.zero_grad()
        loss.backward()
        dist.isend(torch.cat([p.grad.flatten() for p in model.parameters()]), dst=0).wait()
        new = torch.empty(size)
        dist.irecv(new, src=0).wait()
        vector_to_parameters(new, model.parameters())
        if step % 25 == 0:
            print(f"step {step} loss {loss.item():.4f}")
dist.destroy_process_group()
