"""Denoising autoencoder; the update reports the norm of the gradient."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def bumps(n=320, size=40):
    g = torch.Generator().manual_seed(77)
    center = size * torch.rand(n, 1, generator=g)
    width = 2 + 3 * torch.rand(n, 1, generator=g)
    return torch.exp(-(((torch.arange(size) - center) / width) ** 2))


def autoencoder(size=40):
    return nn.Sequential(
        nn.Linear(size, 48), nn.SiLU(), nn.Linear(48, 6), nn.Linear(6, 48), nn.SiLU(), nn.Linear(48, size)
    )


def update(loss, params, optimizer, max_norm):
    optimizer.zero_grad()
    loss.backward()
    norm = clip_grad_norm_(params, max_norm)
    optimizer.step()
    return norm.item()


def run_epoch(model, loader, params, optimizer, args, noise):
    norms, losses = [], []
    for (clean,) in loader:
        noisy = clean + args.noise * torch.randn(clean.shape, generator=noise)
        loss = nn.functional.mse_loss(model(noisy), clean)
        norms.append(update(loss, params, optimizer, args.max_norm))
        losses.append(loss.item())
    return torch.tensor([sum(losses) / len(losses), sum(norms) / len(norms)])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--noise", type=float, default=0.1)
    ap.add_argument("--max-norm", type=float, default=1.0)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(autoencoder())
    params = list(model.parameters())
    optimizer = torch.optim.Adam(params, lr=args.lr)
    data = TensorDataset(bumps())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    noise = torch.Generator().manual_seed(500 + rank)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        stats = run_epoch(model, loader, params, optimizer, args, noise)
        dist.all_reduce(stats)
        stats /= world
        if rank == 0:
            print(f"epoch {epoch}: mse {stats[0].item():.5f}  grad norm {stats[1].item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
