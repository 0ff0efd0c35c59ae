"""Ring-of-Gaussians GAN, both networks under DDP, averaged generator used for evaluation."""
import argparse
import copy
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Ring(Dataset):
    def __init__(self, n=4096, modes=8, radius=2.0, std=0.08, seed=11):
        g = torch.Generator().manual_seed(seed)
        which = torch.randint(0, modes, (n,), generator=g)
        angle = 2 * math.pi * which.float() / modes
        centre = radius * torch.stack([angle.cos(), angle.sin()], dim=1)
        self.points = centre + std * torch.randn(n, 2, generator=g)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, i):
        return self.points[i]


def mlp(din, dout, width=96, slope=0.2):
    return nn.Sequential(
        nn.Linear(din, width), nn.LeakyReLU(slope),
        nn.Linear(width, width), nn.LeakyReLU(slope),
        nn.Linear(width, dout),
    )


class GanTrainer:
    def __init__(self, args, rank, world):
        self.args, self.rank, self.world = args, rank, world
        torch.manual_seed(args.seed)
        self.gen = DDP(mlp(args.latent, 2))
        self.disc = DDP(mlp(2, 1))
        self.gen_ema = copy.deepcopy(self.gen.module).eval().requires_grad_(False)
        self.opt_g = torch.optim.Adam(self.gen.parameters(), lr=args.lr, betas=(0.5, 0.9))
        self.opt_d = torch.optim.Adam(self.disc.parameters(), lr=args.lr, betas=(0.5, 0.9))
        self.noise = torch.Generator().manual_seed(args.seed * 1000 + rank)
        data = Ring()
        self.sampler = DistributedSampler(data, world, rank, shuffle=True, drop_last=True)
        self.loader = DataLoader(data, batch_size=args.batch_size, sampler=self.sampler, drop_last=True)

    def sample_z(self, n):
        return torch.randn(n, self.args.latent, generator=self.noise)

    def discriminator_step(self, real):
        n = real.size(0)
        with torch.no_grad():
            fake = self.gen.module(self.sample_z(n))
        logits = self.disc(torch.cat([real, fake])).squeeze(1)
        target = torch.cat([torch.full((n,), 0.9), torch.zeros(n)])
        loss = bce(logits, target)
        loss.backward()
        self.opt_d.step()
        self.opt_d.zero_grad()
        return loss.item()

    def generator_step(self, n):
        fake = self.gen(self.sample_z(n))
        loss = bce(self.disc(fake).squeeze(1), torch.ones(n))
        self.opt_g.zero_grad()
        loss.backward()
        self.opt_g.step()
        return loss.item()

    @torch.no_grad()
    def update_ema(self):
        for avg, p in zip(self.gen_ema.parameters(), self.gen.module.parameters()):
            avg.lerp_(p, 1 - self.args.ema)

    @torch.no_grad()
    def distance_to_ring(self, n=512):
        pts = self.gen_ema(self.sample_z(n))
        dev = (pts.norm(dim=1) - 2.0).abs().sum()
        stats = torch.stack([dev, torch.tensor(float(n))])
        dist.all_reduce(stats)
        return (stats[0] / stats[1]).item()

    def fit(self):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            totals = torch.zeros(3)
            for real in self.loader:
                d = self.discriminator_step(real)
                g = self.generator_step(real.size(0))
                self.update_ema()
                totals += torch.tensor([d, g, 1.0])
            dist.all_reduce(totals)
            ring = self.distance_to_ring()
            if self.rank == 0:
                print(f"epoch {epoch:2d} d {totals[0] / totals[2]:.4f} "
                      f"g {totals[1] / totals[2]:.4f} | off-ring {ring:.3f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--batch-size", type=int, default=64)
    ap.add_argument("--latent", type=int, default=8)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--ema", type=float, default=0.98)
    ap.add_argument("--seed", type=int, default=5)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    GanTrainer(args, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
