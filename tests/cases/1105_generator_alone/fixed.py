"""GAN on points of a ring."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def mlp(n_in, n_out, width=32):
    return nn.Sequential(nn.Linear(n_in, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, n_out))


def ring(n=384):
    g = torch.Generator().manual_seed(77)
    phi = 6.283 * torch.rand(n, generator=g)
    r = 1 + 0.05 * torch.randn(n, generator=g)
    return TensorDataset(torch.stack([r * phi.cos(), r * phi.sin()], 1))


class GAN:
    def __init__(self, latent, lr, rank):
        torch.manual_seed(9)
        self.latent = latent
        self.gen = DDP(mlp(latent, 2))
        self.disc = DDP(mlp(2, 1))
        self.g_opt = torch.optim.Adam(self.gen.parameters(), lr=lr, betas=(0.5, 0.9))
        self.d_opt = torch.optim.Adam(self.disc.parameters(), lr=lr, betas=(0.5, 0.9))
        torch.manual_seed(100 + rank)

    def d_step(self, real):
        with torch.no_grad():
            fake = self.gen(torch.randn(len(real), self.latent))
        score = self.disc(torch.cat([real, fake]))
        label = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        loss = F.binary_cross_entropy_with_logits(score, label)
        self.d_opt.zero_grad()
        loss.backward()
        self.d_opt.step()
        return loss.item()

    def g_step(self, n):
        fake = self.gen(torch.randn(n, self.latent))
        loss = F.softplus(-self.disc(fake)).mean()
        self.g_opt.zero_grad()
        loss.backward()
        self.g_opt.step()
        return loss.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=24)
    ap.add_argument("--latent", type=int, default=4)
    ap.add_argument("--lr", type=float, default=1e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])

    gan = GAN(args.latent, args.lr, rank)
    data = ring()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        stats = torch.zeros(3)
        for (real,) in loader:
            stats += torch.tensor([gan.d_step(real), gan.g_step(len(real)), 1.0])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch}: D {stats[0] / stats[2]:.3f}  G {stats[1] / stats[2]:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
