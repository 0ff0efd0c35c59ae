"""Unequal shards under the Join context: rank 1 has far fewer samples, DDP shadows its collectives until the others are done."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def hospital(site):
    """Each site has its own amount of data and its own sex ratio: 260, 150, ... patients."""
    g = torch.Generator().manual_seed(70 + site)
    n = 260 if site == 0 else 150
    x = torch.randn(n, 9, generator=g)
    x[:, 0] = (torch.rand(n, generator=g) < 0.3 + 0.3 * site).float()
    y = (x[:, 1] + 0.5 * x[:, 0] + 0.4 * torch.randn(n, generator=g) > 0.2).float()
    return TensorDataset(x, y)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(30)
    model = DDP(nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.2)  # without momentum: there is no state that a site would miss while it is shadowing
    data = hospital(rank)
    shuffle = torch.Generator().manual_seed(rank)
    loader = DataLoader(data, batch_size=13, shuffle=True, generator=shuffle)
    print(f"site {rank}: {len(data)} patients, {len(loader)} batches", flush=True)
    for epoch in range(4):
        sums = torch.zeros(3)
        with Join([model]):  # at its end the site that worked last sends its weights to the others
            for x, y in loader:
                out = model(x).squeeze(1)
                loss = F.binary_cross_entropy_with_logits(out, y)
                opt.zero_grad()
                loss.backward()
                opt.step()
                sums += torch.tensor([loss.item() * len(y), ((out > 0) == (y > 0.5)).sum(), len(y)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: loss {sums[0] / sums[2]:.4f} accuracy {sums[1] / sums[2]:.3f} on {int(sums[2])} patients")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
