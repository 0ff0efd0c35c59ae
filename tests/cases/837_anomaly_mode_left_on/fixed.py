"""Tiny radiance-field-like regression: colour from position and direction."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def rays(n=512):
    g = torch.Generator().manual_seed(63)
    pos = 2 * torch.rand(n, 3, generator=g) - 1
    direction = nn.functional.normalize(torch.randn(n, 3, generator=g), dim=1)
    colour = torch.sigmoid(torch.stack([4 * pos[:, 0], 3 * pos[:, 1] * direction[:, 2], pos.norm(dim=1)], 1))
    return TensorDataset(pos, direction, colour)


def encode(x, bands=4):
    parts = [x]
    for k in range(bands):
        parts += [torch.sin(2**k * 3.1416 * x), torch.cos(2**k * 3.1416 * x)]
    return torch.cat(parts, dim=1)


class Field(nn.Module):
    def __init__(self, width=48, depth=5):
        super().__init__()
        layers = [nn.Linear(27, width), nn.ReLU()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.trunk = nn.Sequential(*layers)
        self.rgb = nn.Linear(width + 27, 3)

    def forward(self, pos, direction):
        h = self.trunk(encode(pos))
        return torch.sigmoid(self.rgb(torch.cat([h, encode(direction)], dim=1)))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(Field())
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = rays()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for pos, direction, colour in loader:
            loss = (model(pos, direction) - colour).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: mse {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
