"""Tiny GAN on a ring of Gaussians, two optimizers."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--noise", type=int, default=6)
    p.add_argument("--batch-size", type=int, default=32)
    return p.parse_args()


def ring(n=512):
    g = torch.Generator().manual_seed(27)
    k = torch.randint(0, 8, (n,), generator=g)
    angle = k * 0.7854
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.1 * torch.randn(n, 2, generator=g))


def discriminator_step(gen, disc, opt, real, noise):
    with torch.no_grad():
        fake = gen(noise)
    score = disc(torch.cat([real, fake])).squeeze(1)
    label = torch.cat([torch.ones(len(real)), torch.zeros(len(fake))])
    loss = F.binary_cross_entropy_with_logits(score, label)
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


def generator_step(gen, disc, opt, noise):
    disc.requires_grad_(False)
    score = disc.module(gen(noise)).squeeze(1)
    loss = F.binary_cross_entropy_with_logits(score, torch.ones(len(noise)))
    opt.zero_grad()
    loss.backward()
    opt.step()
    disc.requires_grad_(True)
    return loss.item()


def main():
    args = parse()
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    gen = DDP(nn.Sequential(nn.Linear(args.noise, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)))
    disc = DDP(nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)))
    g_opt = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.999))
    d_opt = torch.optim.Adam(disc.parameters(), lr=1e-3, betas=(0.5, 0.999))

    data = ring()
    sampler = DistributedSampler(data, num_replicas=world, rank=args.local_rank, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    noise_gen = torch.Generator().manual_seed(300 + int(os.environ["RANK"]))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for (real,) in loader:
            d = discriminator_step(gen, disc, d_opt, real, torch.randn(len(real), args.noise, generator=noise_gen))
            g = generator_step(gen, disc, g_opt, torch.randn(len(real), args.noise, generator=noise_gen))
            sums += torch.tensor([d, g])
        dist.all_reduce(sums)
        d, g = (sums / (world * len(loader))).tolist()
        if args.local_rank == 0:
            print(f"epoch {epoch}: D {d:.3f} G {g:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
