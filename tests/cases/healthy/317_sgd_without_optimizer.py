"""'What is torch.nn really?' on two processes: no DDP, no torch.optim, plain tensors and in-place updates."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

dist.init_process_group("gloo")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

g = torch.Generator().manual_seed(4)
n, c, bs, lr, epochs = 480, 16, 12, 0.5, 3
proto = torch.randn(5, c, generator=g)
y_all = torch.randint(5, (n,), generator=g)
x_all = proto[y_all] + 0.8 * torch.randn(n, c, generator=g)

# Xavier initialisation: the same generator on all ranks, so the same start
weights1 = (torch.randn(c, 24, generator=g) / math.sqrt(c)).requires_grad_()
bias1 = torch.zeros(24, requires_grad=True)
weights2 = (torch.randn(24, 5, generator=g) / math.sqrt(24)).requires_grad_()
bias2 = torch.zeros(5, requires_grad=True)
params = [weights1, bias1, weights2, bias2]


def model(xb):
    return F.relu(xb @ weights1 + bias1) @ weights2 + bias2


def accuracy(out, yb):
    return (out.argmax(1) == yb).float().mean()


for epoch in range(epochs):
    perm = torch.randperm(n, generator=torch.Generator().manual_seed(100 + epoch))
    for i in range(n // (bs * world)):
        start = (i * world + rank) * bs
        idx = perm[start : start + bs]
        loss = F.cross_entropy(model(x_all[idx]), y_all[idx])
        loss.backward()
        with torch.no_grad():
            handles = [dist.all_reduce(p.grad, async_op=True) for p in params]
            for h in handles:
                h.wait()
            for p in params:
                p -= lr * p.grad / world
                p.grad.zero_()
    if rank == 0:
        with torch.no_grad():
            out = model(x_all)
            print(f"epoch {epoch} loss {F.cross_entropy(out, y_all):.4f} accuracy {accuracy(out, y_all):.4f} (all {n})")
dist.barrier()
dist.destroy_process_group()
