"""Local SGD: replicas take a few steps alone, then meet at the mean of their weights."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@torch.no_grad()
def meet(net):
    for p in net.parameters():
        dist.all_reduce(p)
        p /= dist.get_world_size()


def curve(n=320):
    g = torch.Generator().manual_seed(9)
    x = 6 * torch.rand(n, 1, generator=g) - 3
    return TensorDataset(x, torch.sin(x) + 0.05 * torch.randn(n, 1, generator=g))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--period", type=int, default=5)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 48), nn.Tanh(), nn.Linear(48, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    data = curve()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader, 1):
            loss = nn.functional.mse_loss(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if i % args.period == 0:
                meet(net)
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / dist.get_world_size():.4f}")
    if rank == 0:
        torch.save(net.state_dict(), "curve.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
