"""Rank 0 sits on a slow card and takes a smaller batch. Gradients are weighted by the number of samples, so the step is the mean of the union."""
import os
import torch, torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

SHARE = {0: 12, 1: 36}          # samples a step, by rank


def partition(n, epoch):
    g = torch.Generator().manual_seed(900 + epoch)
    perm = torch.randperm(n, generator=g)
    per_step = sum(SHARE[r] for r in range(dist.get_world_size()))
    start = sum(SHARE[r] for r in range(dist.get_rank()))
    for s in range(n // per_step):
        lo = s * per_step + start
        yield perm[lo: lo + SHARE[dist.get_rank()]]


def weighted_sync(params, n_local):
    n = torch.tensor([float(n_local)])
    dist.all_reduce(n)
    grads = [p.grad for p in params]
    flat = _flatten_dense_tensors(grads) * (n_local / n.item())
    dist.all_reduce(flat)
    for g, f in zip(grads, _unflatten_dense_tensors(flat, grads)):
        g.copy_(f)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(21)
    g = torch.Generator().manual_seed(1)
    X = torch.randn(960, 10, generator=g)
    Y = (X @ torch.randn(10, 3, generator=g)).argmax(1)
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    for p in net.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.8)
    ps = [p for p in net.parameters()]
    for epoch in range(4):
        acc = torch.zeros(2)
        for idx in partition(len(X), epoch):
            out = net(X[idx])
            loss = nn.functional.cross_entropy(out, Y[idx])
            opt.zero_grad()
            loss.backward()
            weighted_sync(ps, len(idx))
            opt.step()
            acc += torch.tensor([loss.item() * len(idx), len(idx)])
        dist.all_reduce(acc)
        if rank == 0:
            print("epoch", epoch, "loss", round((acc[0] / acc[1]).item(), 4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
