"""A one-shot grid detector on synthetic crowd images, sharded with FSDP2."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CELLS, CELL = 6, 4


class Crowds(Dataset):
    """Square objects on a grid; most images are nearly empty, some are packed."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        density = torch.rand(n, 1, 1, generator=g) ** 3
        self.there = torch.rand(n, CELLS, CELLS, generator=g) < 0.03 + 0.8 * density
        self.size = 1 + 3 * torch.rand(n, CELLS, CELLS, generator=g)
        offset = torch.arange(CELLS * CELL).float() % CELL - (CELL - 1) / 2
        near = torch.maximum(offset.abs().view(-1, 1), offset.abs().view(1, -1))
        wide = self.size.repeat_interleave(CELL, 1).repeat_interleave(CELL, 2)
        lit = self.there.repeat_interleave(CELL, 1).repeat_interleave(CELL, 2)
        self.image = ((near < wide / 2) & lit).float() + 0.3 * torch.randn(n, CELLS * CELL, CELLS * CELL, generator=g)

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        return self.image[i].unsqueeze(0), self.there[i], self.size[i]


class GridDetector(nn.Module):
    def __init__(self, c=32):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, c, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.neck = nn.Sequential(nn.Conv2d(c, 2 * c, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Conv2d(2 * c, 2, 1)

    def forward(self, x):
        return self.head(self.neck(self.stem(x)))


class DetectionLoss(nn.Module):
    """Both terms are sums over the images, divided by the number of objects."""

    def __init__(self, size_weight=1.0):
        super().__init__()
        self.size_weight = size_weight

    def forward(self, out, there, true_size):
        score, size = out.unbind(1)
        objects = there.sum().float()
        dist.all_reduce(objects)
        objects = objects / dist.get_world_size()
        objects = objects.clamp(min=1)
        found = F.binary_cross_entropy_with_logits(score, there.float(), reduction="sum") / objects
        fit = (F.l1_loss(size, true_size, reduction="none") * there).sum() / objects
        return found + self.size_weight * fit


def build(mesh):
    net = GridDetector()
    for part in (net.stem, net.neck):
        fully_shard(part, mesh=mesh)
    return fully_shard(net, mesh=mesh)


@torch.no_grad()
def f1(net, loader):
    net.eval()
    counts = torch.zeros(3)
    for image, there, _ in loader:
        found = net(image)[:, 0] > 0
        counts += torch.stack([(found & there).sum(), found.sum(), there.sum()])
    dist.all_reduce(counts)
    net.train()
    return (2 * counts[0] / (counts[1] + counts[2]).clamp(min=1)).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=1e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(14)
    net = build(init_device_mesh("cpu", (world,)))
    opt = torch.optim.AdamW(net.parameters(), lr=args.lr)
    criterion = DetectionLoss()
    train, val = Crowds(192, 1), Crowds(64, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, args.batch, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val, args.batch, sampler=DistributedSampler(val, shuffle=False))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for image, there, size in loader:
            loss = criterion(net(image), there, size)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        quality = f1(net, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / len(loader) / world:.3f}, F1 {quality:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
