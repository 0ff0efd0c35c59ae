"""Small segmentation network with a moving-average loss display."""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Config:
    epochs: int = 4
    batch_size: int = 12
    lr: float = 0.4
    momentum: float = 0.9
    size: int = 16
    images: int = 240


class Meter:
    def __init__(self):
        self.values = []

    def add(self, value):
        self.values.append(value)

    def __str__(self):
        recent = self.values[-10:]
        return f"{sum(recent) / len(recent):.4f}"


def make_images(cfg):
    g = torch.Generator().manual_seed(77)
    corner = torch.randint(1, cfg.size - 6, (cfg.images, 2), generator=g)
    mask = torch.zeros(cfg.images, 1, cfg.size, cfg.size)
    for i, (r, c) in enumerate(corner.tolist()):
        mask[i, 0, r : r + 5, c : c + 5] = 1
    return TensorDataset(mask + 0.7 * torch.randn(mask.shape, generator=g), mask)


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.a = nn.Conv2d(1, width, 3, padding=1)
        self.b = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        return self.head(F.relu(self.b(F.relu(self.a(x)))))


def train(cfg, rank, world):
    torch.manual_seed(0)
    data = make_images(cfg)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=cfg.batch_size, sampler=sampler)
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=cfg.momentum)
    meter = Meter()
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for image, mask in loader:
            loss = F.binary_cross_entropy_with_logits(model(image), mask)
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            shown.div_(world)
            meter.add(shown.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {meter}", flush=True)
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = train(Config(), rank, world)
    if rank == 0:
        torch.save(model.module.state_dict(), "segment.pt")
    dist.destroy_process_group()
