"""Two stages on two ranks, activations and gradients by send and recv, four micro-batches a step."""
import torch
import torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
MICRO, B = 4, 16
g = torch.Generator().manual_seed(3)        # the first stage reads x, the last y, of the same stream
w = torch.randn(16, 4, generator=g)
stage = nn.Sequential(nn.Linear(16, 64), nn.ReLU()) if rank == 0 else nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
opt = torch.optim.Adam(stage.parameters(), lr=3e-3)
for step in range(80):
    x = torch.randn(MICRO * B, 16, generator=g)
    y = (x @ w).argmax(1)
    opt.zero_grad()
    if rank == 0:
        outs = []
        for xb in x.chunk(MICRO):
            out = stage(xb)
            dist.send(out.detach(), 1)
            outs.append(out)
        for out in outs:
            grad = torch.empty_like(out)
            dist.recv(grad, 1)
            out.backward(grad)
    else:
        total, grads = 0.0, []
        for yb in y.chunk(MICRO):
            h = torch.empty(B, 64)
            dist.recv(h, 0)
            h.requires_grad_()
            loss = nn.functional.cross_entropy(stage(h), yb) / MICRO
            loss.backward()
            total += loss.item()
            grads.append(h.grad)
        for grad in grads:
            dist.send(grad, 0)
    opt.step()
    if rank == 1 and step % 20 == 19:
        print(f"step {step} loss {total:.4f}")
dist.destroy_process_group()
