"""Heterogeneous machines: the share of a global batch that a process gets follows its speed."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SPEED = {0: 3, 1: 1}  # measured beforehand
GLOBAL_BATCH = 32


class ShareSampler:
    """Cuts every global batch of a common permutation into parts in proportion to the speeds."""

    def __init__(self, n, rank, world, seed=0):
        self.n, self.rank, self.seed, self.epoch = n, rank, seed, 0
        speeds = [SPEED.get(r, 1) for r in range(world)]
        bounds = [GLOBAL_BATCH * sum(speeds[:r]) // sum(speeds) for r in range(world + 1)]
        self.lo, self.hi = bounds[rank], bounds[rank + 1]

    def __len__(self):
        return self.n // GLOBAL_BATCH

    def __iter__(self):
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        for b in range(len(self)):
            yield order[b * GLOBAL_BATCH + self.lo : b * GLOBAL_BATCH + self.hi].tolist()


def house_prices(n=448):
    g = torch.Generator().manual_seed(7)
    x = torch.rand(n, 6, generator=g)
    price = 3 * x[:, :1] * x[:, 1:2] + torch.sin(4 * x[:, 2:3]) + 0.05 * torch.randn(n, 1, generator=g)
    return torch.utils.data.TensorDataset(x, price)


def weighted_loss(per_sample, world):
    """DDP takes the plain mean over ranks; scaled like this it becomes the mean over all samples"""
    return per_sample.sum() * world / GLOBAL_BATCH


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = house_prices()
    batches = ShareSampler(len(data), rank, world)
    loader = torch.utils.data.DataLoader(data, batch_sampler=batches)
    for epoch in range(3):
        batches.epoch = epoch
        sums = torch.zeros(2)
        for x, y in loader:
            per_sample = (model(x) - y).square().squeeze(1)
            loss = weighted_loss(per_sample, world)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sums += torch.tensor([per_sample.sum().item(), len(x)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: mse {(sums[0] / sums[1]).item():.4f} over {int(sums[1])} samples")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
