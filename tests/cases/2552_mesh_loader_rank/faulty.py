"""Spectrum classifier on a two-dimensional mesh: data parallel x tensor parallel (4 processes)."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Spectra(Dataset):
    """Sums of three peaks; the class is the position of the tallest one."""

    def __init__(self, n, seed, bins=64, classes=8):
        g = torch.Generator().manual_seed(seed)
        axis = torch.arange(bins).float()
        centre = torch.rand(n, 3, generator=g) * bins
        height = torch.rand(n, 3, generator=g) + torch.tensor([1.5, 0.0, 0.0])
        peaks = height[..., None] * torch.exp(-0.5 * ((axis - centre[..., None]) / 2.5) ** 2)
        self.x = peaks.sum(1) + 0.05 * torch.randn(n, bins, generator=g)
        self.y = (centre[:, 0] / bins * classes).long().clamp(max=classes - 1)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, bins=64, dim=64, hidden=128, depth=2, classes=8):
        super().__init__()
        self.stem = nn.Linear(bins, dim)
        self.layers = nn.ModuleList(FeedForward(dim, hidden) for _ in range(depth))
        self.out = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def build_model(mesh):
    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def build_loaders(mesh, batch_size):
    replicas, index = dist.get_world_size(), dist.get_rank()
    train, val = Spectra(1536, seed=3), Spectra(384, seed=4)
    sampler = DistributedSampler(train, num_replicas=replicas, rank=index, shuffle=True, seed=9)
    val_sampler = DistributedSampler(val, num_replicas=mesh["dp"].size(), rank=mesh["dp"].get_local_rank(), shuffle=False)
    return (
        DataLoader(train, batch_size=batch_size, sampler=sampler, drop_last=True),
        DataLoader(val, batch_size=64, sampler=val_sampler),
        sampler,
    )


@torch.no_grad()
def accuracy(model, loader, group):
    model.eval()
    hits = torch.zeros(2)
    for x, y in loader:
        hits += torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)], dtype=torch.float)
    dist.all_reduce(hits, group=group)
    model.train()
    return (hits[0] / hits[1]).item()


def run(args):
    world = int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (world // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    dp_group = mesh["dp"].get_group()

    model = build_model(mesh)
    train_loader, val_loader, sampler = build_loaders(mesh, args.batch_size)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3, foreach=False)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        seen = torch.zeros(2)
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            seen += torch.tensor([loss.item() * len(y), len(y)])
        dist.all_reduce(seen, group=dp_group)
        acc = accuracy(model, val_loader, dp_group)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {(seen[0] / seen[1]).item():.4f} val acc {acc:.3f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--tp", type=int, default=2)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=32)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    run(args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
