"""DCGAN on small synthetic textures, both networks under DDP."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def textures(n=192):
    g = torch.Generator().manual_seed(31)
    yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    freq = 0.3 + torch.rand(n, 2, generator=g)
    phase = 6.28 * torch.rand(n, 1, 1, generator=g)
    img = torch.sin(freq[:, :1, None] * xx + freq[:, 1:, None] * yy + phase)
    return TensorDataset(img.unsqueeze(1))


class Generator(nn.Module):
    def __init__(self, zdim=16):
        super().__init__()
        self.zdim = zdim
        self.fc = nn.Linear(zdim, 16 * 4 * 4)
        self.net = nn.Sequential(
            nn.Upsample(scale_factor=2), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
            nn.Upsample(scale_factor=2), nn.Conv2d(16, 1, 3, padding=1), nn.Tanh(),
        )

    def forward(self, z):
        return self.net(self.fc(z).view(-1, 16, 4, 4))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.2),
            nn.Conv2d(32, 1, 4),
        )

    def forward(self, x):
        return self.net(x).flatten()


def d_step(disc, gen, real, zdim, opt):
    with torch.no_grad():
        fake = gen(torch.randn(len(real), zdim))
    real_out, fake_out = disc(torch.cat([real, fake])).chunk(2)
    loss = F.softplus(-real_out).mean() + F.softplus(fake_out).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


def g_step(disc, gen, n, zdim, opt):
    for p in disc.parameters():
        p.requires_grad_(False)
    loss = F.softplus(-disc.module(gen(torch.randn(n, zdim)))).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    for p in disc.parameters():
        p.requires_grad_(True)
    return loss.item()


@torch.no_grad()
def preview(gen, count, path):
    """A page of samples, always from the same noise."""
    z = torch.randn(count, gen.zdim, generator=torch.Generator().manual_seed(0))
    torch.save((127.5 * (gen(z) + 1)).to(torch.uint8), path)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--zdim", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(1)
    gen, disc = DDP(Generator(args.zdim)), DDP(Discriminator())
    opt_g = torch.optim.Adam(gen.parameters(), lr=2e-4, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(disc.parameters(), lr=2e-4, betas=(0.5, 0.999))
    torch.manual_seed(100 + rank)  # other noise on every rank

    data = textures()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for (real,) in loader:
            d = d_step(disc, gen, real, args.zdim, opt_d)
            g = g_step(disc, gen, len(real), args.zdim, opt_g)
            sums += torch.tensor([d, g])
        dist.all_reduce(sums)
        if rank == 0:
            d, g = (sums / len(loader) / dist.get_world_size()).tolist()
            print(f"epoch {epoch}: D {d:.3f} G {g:.3f}", flush=True)
            preview(gen, 8, f"samples_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
