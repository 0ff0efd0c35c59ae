"""A copy of a well-known library's scheduler wrapper."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class PreparedScheduler:
    """Steps the schedule after the optimizer has stepped."""

    def __init__(self, scheduler, optimizer, num_processes):
        self.scheduler, self.optimizer, self.num_processes = scheduler, optimizer, num_processes

    def step(self):
        self.scheduler.step()

    def lr(self):
        return self.scheduler.get_last_lr()[0]


class PreparedOptimizer:
    def __init__(self, optimizer, max_norm):
        self.optimizer, self.max_norm = optimizer, max_norm

    def step(self, model):
        nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def angles(n):
    g = torch.Generator().manual_seed(10)
    a = 6.2832 * torch.rand(n, 1, generator=g)
    return TensorDataset(torch.cat([a.cos(), a.sin()], 1) + 0.02 * torch.randn(n, 2, generator=g), torch.cat([(3 * a).cos(), (2 * a).sin()], 1))


def main(epochs=4, batch_size=16):
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2)))
    data = angles(320)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size, sampler=sampler)
    total_steps = epochs * len(loader)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    optimizer = PreparedOptimizer(adam, 1.0)
    scheduler = PreparedScheduler(CosineAnnealingLR(adam, T_max=total_steps), adam, world)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        losses = []
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step(model)
            scheduler.step()
            losses.append(loss.item())
        mean = torch.tensor(losses).mean()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean.item() / world:.4f} lr {scheduler.lr():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
