"""Segmentation-like net with a deep supervision head and a configurable loss."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

LOSSES = {}


def register(name):
    def deco(fn):
        LOSSES[name] = fn
        return fn
    return deco


@register("pixel")
def pixel_loss(out, target):
    return F.cross_entropy(out["main"], target)


@register("deep_supervision")
def aux_loss(out, target):
    small = F.max_pool2d(target[:, None].float(), 2).squeeze(1).long()
    return F.cross_entropy(out["aux"], small)


@register("smooth")
def smooth_loss(out, target):
    p = out["main"].softmax(1)
    return (p[..., 1:] - p[..., :-1]).abs().mean() + (p[..., 1:, :] - p[..., :-1, :]).abs().mean()


class WeightedLoss:
    def __init__(self, weights):
        unknown = set(weights) - set(LOSSES)
        if unknown:
            raise KeyError(f"no such loss: {unknown}")
        self.weights = {k: w for k, w in weights.items() if w}

    def __call__(self, out, target):
        return sum(w * LOSSES[k](out, target) for k, w in self.weights.items())


class SegNet(nn.Module):
    def __init__(self, ch=8, classes=2, deep_supervision=True):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, ch, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.up = nn.ConvTranspose2d(ch, ch, 2, stride=2)
        self.head = nn.Conv2d(ch, classes, 1)
        self.aux_head = nn.Conv2d(ch, classes, 1) if deep_supervision else None

    def forward(self, x):
        d = self.down(x)
        return {"main": self.head(self.up(d).relu()), "aux": self.aux_head(d) if self.aux_head else None}


def squares(gen, n):
    target = torch.zeros(n, 16, 16, dtype=torch.long)
    for k in range(n):
        r, c = torch.randint(0, 10, (2,), generator=gen).tolist()
        target[k, r : r + 6, c : c + 6] = 1
    return (target[:, None] + 0.6 * torch.randn(n, 1, 16, 16, generator=gen)), target


def main(weights, steps=30):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(8)
    criterion = WeightedLoss(weights)
    model = DistributedDataParallel(SegNet(deep_supervision="deep_supervision" in criterion.weights))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(rank)
    for step in range(steps):
        x, y = squares(gen, 6)
        loss = criterion(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and step % 10 == 0:
            print("step", step, "rank 0 loss", round(loss.item(), 4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main({"pixel": 1.0, "deep_supervision": 0.0, "smooth": 0.1})
