"""One-dimensional GAN with two wrapped networks and two optimizers."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def real_batch(n, g):
    mode = torch.randint(0, 2, (n, 1), generator=g).float() * 4 - 2
    return mode + 0.3 * torch.randn(n, 1, generator=g)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--batch-size", type=int, default=32)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    gen = DDP(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1)))
    disc = DDP(nn.Sequential(nn.Linear(1, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
    opt_g = torch.optim.Adam(gen.parameters(), lr=2e-3, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(disc.parameters(), lr=2e-3, betas=(0.5, 0.99))
    g = torch.Generator().manual_seed(1000 + rank)

    for step in range(args.steps):
        z = torch.randn(args.batch_size, 4, generator=g)
        with torch.no_grad():
            fake = gen.module(z)
        scores = disc(torch.cat([real_batch(args.batch_size, g), fake]))
        real_score, fake_score = scores.chunk(2)
        loss_d = F.softplus(-real_score).mean() + F.softplus(fake_score).mean()
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()

        disc.module.requires_grad_(False)
        loss_g = F.softplus(-disc.module(gen(z))).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        disc.module.requires_grad_(True)
        if rank == 0 and step % 15 == 14:
            print(f"step {step}: D {loss_d.item():.3f} G {loss_g.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
