"""Denoising autoencoder on data that lies in memory; no DataLoader. Gradients are averaged in one flat bucket."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import parameters_to_vector

STEPS_PER_EPOCH = 20
BATCH = 12
EPOCHS = 4


class InMemory:
    """Deals a fresh permutation to the ranks in every epoch."""

    def __init__(self, data, rank, world, seed=0):
        self.data, self.rank, self.world, self.seed = data, rank, world, seed

    def permutation(self, epoch):
        return torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.seed + epoch))

    def mine(self, epoch):
        chunks = self.permutation(epoch).chunk(self.world)
        return chunks[self.rank % self.world]

    def epoch(self, epoch, batch):
        for index in self.mine(epoch).split(batch):
            yield self.data[index]


class FlatAverager:
    def __init__(self, module, world):
        self.params = list(module.parameters())
        self.world = world
        for p in self.params:
            dist.broadcast(p.data, src=0)

    def average(self):
        flat = parameters_to_vector([p.grad for p in self.params])
        dist.all_reduce(flat)
        flat /= self.world
        offset = 0
        for p in self.params:
            p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()


def curves(n):
    gen = torch.Generator().manual_seed(35)
    t = torch.linspace(0, 6, 40)
    a, f, s = torch.rand(3, n, 1, generator=gen)
    return (0.5 + a) * torch.sin((0.5 + 2 * f) * t + 6 * s)


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(40, 48), nn.ELU(), nn.Linear(48, 8), nn.ELU(), nn.Linear(8, 48), nn.ELU(), nn.Linear(48, 40))
    averager = FlatAverager(net, world)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    source = InMemory(curves(STEPS_PER_EPOCH * BATCH * world), rank, world)
    noise = torch.Generator().manual_seed(100 + rank)
    for epoch in range(EPOCHS):
        total = torch.zeros(())
        for clean in source.epoch(epoch, BATCH):
            noisy = clean + 0.2 * torch.randn(clean.shape, generator=noise)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(noisy), clean)
            loss.backward()
            averager.average()
            optimizer.step()
            total += loss.detach() / STEPS_PER_EPOCH
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: reconstruction {total.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
