import os, math
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def share(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


def reduce_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)


class Gather(torch.autograd.Function):
    """All ranks' embeddings; the gradient of the own ones comes back."""

    @staticmethod
    def forward(ctx, x):
        out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def nt_xent(z):
    n = len(z) // 2
    logits = z @ z.T / 0.2
    logits.fill_diagonal_(-1e9)
    return F.cross_entropy(logits, torch.arange(2 * n).roll(n))


def main():
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(1024, 8, generator=g))
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
    share(net)
    model = net
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    torch.manual_seed(10 + rank)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            opt.zero_grad()
            za = F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
            zb = F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
            loss = nt_xent(torch.cat([Gather.apply(za), Gather.apply(zb)]))
            loss.backward()
            reduce_gradients(net)
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
