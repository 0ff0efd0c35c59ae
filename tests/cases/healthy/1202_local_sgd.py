"""Local SGD: every process makes four steps on its own, then the weights are averaged."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

PERIOD = 4


def data(n=384):
    g = torch.Generator().manual_seed(15)
    x = torch.rand(n, 4, generator=g)
    return TensorDataset(x, (x[:, :1] * x[:, 1:2] - x[:, 2:3]).sin() + 0.02 * torch.randn(n, 1, generator=g))


@torch.no_grad()
def average_weights(net, world):
    for p in net.parameters():
        dist.all_reduce(p)
        p.div_(world)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    train = data()
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)  # 12 steps, three periods
    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for i, (x, y) in enumerate(loader, 1):
            loss = nn.functional.mse_loss(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if i % PERIOD == 0:
                average_weights(net, world)
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: mse {total.item() / world / len(loader):.4f}", flush=True)
    if rank == 0:
        torch.save(net.state_dict(), "local_sgd.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
