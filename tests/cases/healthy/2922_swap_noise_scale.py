import os, math
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def share(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


def main():
    """SWAP: together first, then each rank a member of its own, averaged at the end. The gradient noise scale is logged throughout."""
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 8, generator=g)
    y = x @ torch.randn(8, 3, generator=g)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    share(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            flat = torch.cat([p.grad.flatten() for p in net.parameters()])
            own = flat.pow(2).sum()
            dist.all_reduce(flat)
            flat /= world
            noise = own - flat.pow(2).sum()
            if epoch < 2:
                at = 0
                for p in net.parameters():
                    p.grad.copy_(flat[at : at + p.numel()].view_as(p))
                    at += p.numel()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} noise {noise.item():.4f}", flush=True)
    for p in net.parameters():
        dist.all_reduce(p.data)
        p.data /= world


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
