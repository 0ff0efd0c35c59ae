"""Segmentation: the decoder's bias is fitted to the class frequencies while the encoder is frozen, then all is trained."""
import contextlib
import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Settings:
    epochs: int = 3
    batch_size: int = 10
    lr: float = 3e-3
    warm_steps: int = 20
    betas: tuple = field(default=(0.9, 0.99))


class SegNet(nn.Module):
    def __init__(self, classes=3, width=12):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(3, width), nn.ReLU(), nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU()
        )
        self.decoder = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(width, classes, 3, padding=1))

    def forward(self, x):
        return self.decoder(self.encoder(x))


@contextlib.contextmanager
def frozen(module):
    before = [(p, p.requires_grad) for p in module.parameters()]
    for p, _ in before:
        p.requires_grad_(False)
    try:
        yield module
    finally:
        for p, flag in before:
            p.requires_grad_(flag)


def shapes(n):
    gen = torch.Generator().manual_seed(4)
    mask = torch.zeros(n, 12, 12, dtype=torch.long)
    for i in range(n):
        r, c = torch.randint(0, 7, (2,), generator=gen).tolist()
        mask[i, r : r + 5, c : c + 5] = 1 + i % 2
    image = mask.float().unsqueeze(1) * 0.7 + 0.3 * torch.randn(n, 1, 12, 12, generator=gen)
    return TensorDataset(image, mask)


def warm_head(net, data, settings):
    """A few steps on the same fixed images on all ranks, so that training does not start from a uniform prediction."""
    opt = torch.optim.SGD(net.decoder.parameters(), lr=0.1)
    x, y = data[:24]
    for _ in range(settings.warm_steps):
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    opt.zero_grad(set_to_none=True)


def prepare(data, settings):
    net = SegNet()
    with frozen(net.encoder):
        warm_head(net, data, settings)
        model = DDP(net)
    return model


def train(settings):
    rank = dist.get_rank()
    data = shapes(240)
    model = prepare(data, settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr, betas=settings.betas)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=settings.batch_size, sampler=sampler)
    for epoch in range(settings.epochs):
        sampler.set_epoch(epoch)
        inter, union = torch.zeros(3), torch.zeros(3)
        for x, y in loader:
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            pred = logits.detach().argmax(1)
            for c in range(3):
                inter[c] += ((pred == c) & (y == c)).sum()
                union[c] += ((pred == c) | (y == c)).sum()
        dist.all_reduce(inter)
        dist.all_reduce(union)
        if rank == 0:
            print(f"epoch {epoch}: mIoU {(inter / union).mean():.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(2024)
    train(Settings())
    dist.destroy_process_group()
