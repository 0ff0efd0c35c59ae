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
    micro, accumulate = 8, 2
    whole = micro * accumulate * world
    g = torch.Generator().manual_seed(0)
    x = torch.randn(13 * 16, 8, generator=g)
    y = x @ torch.randn(8, 4, generator=g)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=micro, sampler=sampler, drop_last=True)  # 13 micro-batches
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    share(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            loss = F.mse_loss(net(x), y, reduction="sum") / whole
            loss.backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                reduce_gradients(net)
                opt.step()
                opt.zero_grad()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
