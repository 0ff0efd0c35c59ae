"""Shards of different length with join(); the first process validates alone between the epochs."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def shard(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    return TensorDataset(x, (x.prod(1) > 0).long())


@torch.no_grad()
def validate(net, dataset):
    net.eval()
    x, y = dataset.tensors
    acc = (net(x).argmax(1) == y).float().mean().item()
    net.train()
    return acc


def main(epochs=4):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.LayerNorm(48), nn.Linear(48, 2)))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    mine = shard(288 + 32 * rank, 10 + rank)
    held_out = shard(100, 99)
    loader = DataLoader(mine, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(rank))
    for epoch in range(epochs):
        with model.join():
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
        if rank == 0:
            print(f"epoch {epoch}: held-out accuracy {validate(model.module, held_out):.3f}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
