"""Half-precision training of a small texture classifier with loss scaling and clipping."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Textures(IterableDataset):
    """Stripes of four directions in noise; sample k of the stream belongs to rank k % world."""

    def __init__(self, start, stop, rank, world):
        self.ids = range(start + rank, stop, world)
        row, col = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
        self.waves = torch.stack([(1.6 * row).sin(), (1.6 * col).sin(), (1.2 * (row + col)).sin(), (1.2 * (row - col)).sin()])

    def __iter__(self):
        for i in self.ids:
            g = torch.Generator().manual_seed(i)
            label = int(torch.randint(0, 4, (), generator=g))
            yield (self.waves[label] + 0.6 * torch.randn(8, 8, generator=g)).flatten(), label


class AmpTrainer:
    def __init__(self, lr=0.3, max_norm=1.0):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(14)
        self.model = DDP(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 4)))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        self.max_norm = max_norm

    def step(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(self.model(x).float(), y)
        self.scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.detach()

    def fit(self, loader):
        window, n = torch.zeros(()), 0
        for k, (x, y) in enumerate(loader, start=1):
            window += self.step(x, y)
            n += 1
            if k % 20 == 0:
                dist.all_reduce(window)
                if self.rank == 0:
                    print(f"step {k}: loss {window.item() / n / self.world:.4f}, scale {self.scaler.get_scale():.0f}")
                window, n = torch.zeros(()), 0

    @torch.no_grad()
    def accuracy(self, loader):
        self.model.eval()
        hits = torch.zeros(2)
        for x, y in loader:
            hits += torch.tensor([(self.model.module(x).argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(hits)
        self.model.train()
        return (hits[0] / hits[1]).item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    trainer = AmpTrainer()
    trainer.fit(DataLoader(Textures(0, 6400, rank, world), batch_size=32))
    acc = trainer.accuracy(DataLoader(Textures(50_000, 50_400, rank, world), batch_size=100))
    if rank == 0:
        print(f"accuracy on fresh textures {acc:.3f}")
    dist.destroy_process_group()
