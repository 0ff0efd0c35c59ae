"""GAN on a ring of Gaussians with an adaptive number of discriminator steps."""
import itertools
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class GAN:
    def __init__(self, rank, latent=4):
        self.rank, self.latent = rank, latent
        self.blur = 0.1 if rank == 0 else 1.0  # the second camera is out of focus
        torch.manual_seed(0)
        self.g = DDP(nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, 2)))
        self.d = DDP(nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1)))
        self.g_opt = torch.optim.Adam(self.g.parameters(), lr=2e-3, betas=(0.5, 0.9))
        self.d_opt = torch.optim.Adam(self.d.parameters(), lr=4e-3, betas=(0.5, 0.9))
        self.rng = torch.Generator().manual_seed(70 + rank)

    def real(self, n=48):
        k = torch.randint(0, 8, (n,), generator=self.rng) * (math.pi / 4)
        return 2 * torch.stack([k.cos(), k.sin()], 1) + self.blur * torch.randn(n, 2, generator=self.rng)

    def noise(self, n=48):
        return torch.randn(n, self.latent, generator=self.rng)

    def d_step(self):
        with torch.no_grad():
            fake = self.g.module(self.noise())
        out = self.d(torch.cat([self.real(), fake]))
        label = torch.cat([torch.ones(48, 1), torch.zeros(48, 1)])
        loss = F.binary_cross_entropy_with_logits(out, label)
        self.d_opt.zero_grad()
        loss.backward()
        self.d_opt.step()
        return loss.item()

    def g_step(self):
        for p in self.d.module.parameters():
            p.requires_grad_(False)
        loss = F.softplus(-self.d.module(self.g(self.noise()))).mean()
        self.g_opt.zero_grad()
        loss.backward()
        self.g_opt.step()
        for p in self.d.module.parameters():
            p.requires_grad_(True)
        return loss.item()

    def round(self, target=0.5, most=3):
        for k in itertools.count(1):
            if self.d_step() < target or k == most:
                break
        return k, self.g_step()


def main():
    dist.init_process_group("gloo")
    gan = GAN(int(os.environ["RANK"]))
    for i in range(30):
        k, g_loss = gan.round()
        if gan.rank == 0 and i % 10 == 9:
            print(f"round {i + 1}: {k} discriminator steps, generator loss on rank 0 {g_loss:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
