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


def main():
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 8, generator=g)
    y = x @ torch.randn(8, 3, generator=g) + 0.1 * torch.randn(1024, 3, generator=g)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    share(net)

    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            per_sample = (net(x) - y).pow(2).mean(1) / world  # a share of the whole batch each
            loss = per_sample.sum() / len(x)
            loss.backward()
            reduce_gradients(net)
            opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"epoch {epoch} loss {shown.item() / world:.4f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
