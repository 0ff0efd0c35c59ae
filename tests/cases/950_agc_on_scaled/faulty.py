"""Patch classifier with adaptive gradient clipping (AGC, Brock et al.) and a gradient scaler."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


# ------------------------------------------------------------------ agc
def unit_norms(t):
    if t.ndim <= 1:
        return t.norm()
    return t.flatten(1).norm(dim=1).view(-1, *[1] * (t.ndim - 1))


@torch.no_grad()
def adaptive_clip_(params, ratio=0.1, floor=1e-2):
    for p in params:
        if p.grad is None:
            continue
        limit = unit_norms(p).clamp_min(floor) * ratio
        size = unit_norms(p.grad)
        p.grad.copy_(torch.where(size > limit, p.grad * (limit / size.clamp_min(1e-6)), p.grad))


# ---------------------------------------------------------------- model
class PatchNet(nn.Module):
    def __init__(self, width=16, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(2, width, 4, stride=4)
        self.mix = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = nn.functional.relu(self.stem(x))
        x = x + nn.functional.relu(self.mix(x))
        return self.head(x.mean((2, 3)))


def textures(n=320, classes=4):
    gen = torch.Generator().manual_seed(90)
    y = torch.randint(0, classes, (n,), generator=gen)
    grid = torch.arange(16.0)
    phase = torch.rand(n, 1, generator=gen) * 6
    row = torch.sin(grid[None] * (0.5 + 0.4 * y[:, None]) + phase)
    x = torch.stack([row[:, :, None].expand(-1, -1, 16), row[:, None, :].expand(-1, 16, -1)], 1)
    return TensorDataset(x + 0.3 * torch.randn(n, 2, 16, 16, generator=gen), y)


class Updater:
    def __init__(self, model, lr, scale):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def __call__(self, loss):
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        adaptive_clip_(self.model.parameters())
        self.scaler.step(self.optimizer)
        self.scaler.update()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--scale", type=float, default=2.0**12)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(36)
    model = DDP(PatchNet())
    update = Updater(model, args.lr, args.scale)
    data = textures()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        stat = torch.zeros(2)
        for x, y in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            update(loss)
            stat += torch.tensor([loss.item() * len(y), len(y)])
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch}: loss {stat[0] / stat[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
