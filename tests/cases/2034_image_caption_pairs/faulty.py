"""Contrastive pairs (picture, caption) with negatives gathered from all processes."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

COLOURS, SHAPES, PLACES = 6, 4, 9


class Pairs(Dataset):
    """A caption is (colour, shape, place); the picture shows it on a noisy 9 x 9 ground."""

    def __init__(self, count):
        gen = torch.Generator().manual_seed(12)
        self.caption = torch.stack([torch.randint(k, (count,), generator=gen) for k in (COLOURS, SHAPES, PLACES)], 1)
        self.noise = 0.4 * torch.randn(count, 3, 9, 9, generator=gen)
        self.palette = torch.randn(COLOURS, 3, generator=gen)
        self.stencil = (torch.rand(SHAPES, 3, 3, generator=gen) < 0.6).float()

    def __len__(self):
        return len(self.caption)

    def __getitem__(self, i):
        colour, shape, place = self.caption[i].tolist()
        picture = self.noise[i].clone()
        row, column = 3 * (place // 3), 3 * (place % 3)
        picture[:, row : row + 3, column : column + 3] += self.palette[colour][:, None, None] * self.stencil[shape]
        return picture, self.caption[i]


class PictureSide(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 48, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48 * 25, dim))

    def forward(self, picture):
        return F.normalize(self.net(picture), dim=1)


class CaptionSide(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(k, 32) for k in (COLOURS, SHAPES, PLACES))
        self.net = nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, dim))

    def forward(self, caption):
        parts = [table(caption[:, i]) for i, table in enumerate(self.tables)]
        return F.normalize(self.net(torch.cat(parts, 1)), dim=1)


class PairModel(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.picture, self.caption = PictureSide(dim), CaptionSide(dim)
        self.scale = nn.Parameter(torch.tensor(2.3))

    def forward(self, picture, caption):
        return self.picture(picture), self.caption(caption), self.scale.exp()


def from_everyone(own):
    """All processes' rows in rank order; gradients flow through our own part."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = [torch.empty_like(own)] * world
    dist.all_gather(parts, own.detach().contiguous())
    parts[rank] = own
    return torch.cat(parts)


def contrast(pictures, captions, scale):
    first = dist.get_rank() * len(pictures)
    target = torch.arange(first, first + len(pictures))
    to_captions = scale * pictures @ from_everyone(captions).t()
    to_pictures = scale * captions @ from_everyone(pictures).t()
    return 0.5 * (F.cross_entropy(to_captions, target) + F.cross_entropy(to_pictures, target))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    data = Pairs(960)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, args.batch, sampler=sampler, drop_last=True)
    model = DDP(PairModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        began, total = time.perf_counter(), 0.0
        for picture, caption in loader:
            loss = contrast(*model(picture, caption))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += loss.item() / len(loader)
        mean = torch.tensor(total)
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch} loss {mean.item() / world:.4f} ({time.perf_counter() - began:.1f} s)", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
