"""Ranks own shards of different size; the join context takes care of the end of the epoch."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def shard(rank):
    n = 160 + 48 * rank
    g = torch.Generator().manual_seed(60 + rank)
    x = torch.randn(n, 6, generator=g)
    return TensorDataset(x, (x[:, :3].sum(1) > x[:, 3:].sum(1)).float())


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    gen = torch.Generator().manual_seed(rank)
    loader = DataLoader(shard(rank), batch_size=16, shuffle=True, generator=gen)
    for epoch in range(3):
        with Join([model]):
            for x, y in loader:
                loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
        if rank == 0:
            print(f"epoch {epoch}: {len(loader)} batches here, loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
