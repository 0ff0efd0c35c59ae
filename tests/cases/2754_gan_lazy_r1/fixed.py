import argparse
import copy
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

MODES = 8


def ring(n, gen):
    k = torch.randint(0, MODES, (n,), generator=gen)
    ang = 2 * math.pi * k / MODES
    centre = torch.stack([ang.cos(), ang.sin()], 1) * 2.0
    return centre + 0.08 * torch.randn(n, 2, generator=gen)


def infinite_shard(data, batch, rank, world, seed):
    epoch = 0
    while True:
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed + epoch))
        mine = order[rank::world]
        for i in range(0, len(mine) - batch + 1, batch):
            yield data[mine[i:i + batch]]
        epoch += 1


def block(i, o):
    return [nn.Linear(i, o), nn.LeakyReLU(0.2)]


class Generator(nn.Module):
    def __init__(self, zdim, width):
        super().__init__()
        self.zdim = zdim
        self.net = nn.Sequential(*block(zdim, width), *block(width, width), nn.Linear(width, 2))

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(*block(2, width), *block(width, width), nn.Linear(width, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


class GanLoop:
    def __init__(self, args, rank, world):
        self.args, self.rank, self.world = args, rank, world
        torch.manual_seed(args.seed)
        self.G = DDP(Generator(args.zdim, args.width))
        self.D = DDP(Discriminator(args.width))
        self.G_ema = copy.deepcopy(self.G.module).requires_grad_(False)
        self.opt_g = torch.optim.Adam(self.G.parameters(), lr=args.lr, betas=(0.0, 0.99))
        ratio = args.r1_every / (args.r1_every + 1)
        self.opt_d = torch.optim.Adam(self.D.parameters(), lr=args.lr * ratio, betas=(0.0, 0.99 ** ratio))
        data = ring(8192, torch.Generator().manual_seed(17))
        self.real = infinite_shard(data, args.batch, rank, world, seed=23)
        torch.manual_seed(args.seed + 1 + rank)

    def noise(self, n):
        return torch.randn(n, self.args.zdim)

    def phase_d(self, real):
        with torch.no_grad():
            fake = self.G.module(self.noise(len(real)))
        logit_real, logit_fake = self.D(torch.cat([real, fake])).chunk(2)
        loss = F.softplus(-logit_real).mean() + F.softplus(logit_fake).mean()
        self.opt_d.zero_grad(set_to_none=True)
        loss.backward()
        self.opt_d.step()
        return loss.detach()

    def phase_r1(self, real):
        real = real.clone().requires_grad_(True)
        logits = self.D(real)
        (grad,) = torch.autograd.grad(logits.sum(), real, create_graph=True)
        penalty = grad.square().sum(1).mean() * (self.args.r1_gamma / 2)
        loss = penalty * self.args.r1_every + 0.0 * logits.mean()
        self.opt_d.zero_grad(set_to_none=True)
        loss.backward()
        self.opt_d.step()
        return penalty.detach()

    def phase_g(self, n):
        for p in self.D.parameters():
            p.requires_grad_(False)
        fake = self.G(self.noise(n))
        loss = F.softplus(-self.D.module(fake)).mean()
        self.opt_g.zero_grad(set_to_none=True)
        loss.backward()
        self.opt_g.step()
        for p in self.D.parameters():
            p.requires_grad_(True)
        with torch.no_grad():
            for e, p in zip(self.G_ema.parameters(), self.G.module.parameters()):
                e.lerp_(p, 0.01)
        return loss.detach()

    @torch.no_grad()
    def score(self, n=1024):
        x = self.G_ema(self.noise(n))
        ang = 2 * math.pi * torch.arange(MODES) / MODES
        centres = torch.stack([ang.cos(), ang.sin()], 1) * 2.0
        dist_, mode = torch.cdist(x, centres).min(1)
        good = dist_ < 0.4
        hist = torch.bincount(mode[good], minlength=MODES).float()
        stats = torch.cat([hist, torch.tensor([good.sum().float(), float(n)])])
        dist.all_reduce(stats)
        covered = int((stats[:MODES] > 0.02 * stats[-1]).sum())
        return covered, (stats[-2] / stats[-1]).item()

    def run(self):
        zeros = torch.zeros(4)
        window = zeros.clone()
        for it in range(1, self.args.iters + 1):
            real = next(self.real)
            d = self.phase_d(real)
            r1 = self.phase_r1(real) if it % self.args.r1_every == 0 else None
            g = self.phase_g(len(real))
            window += torch.stack([d, g, r1 if r1 is not None else torch.tensor(0.0), torch.tensor(1.0)])
            if it % self.args.log_every == 0:
                dist.all_reduce(window)
                covered, quality = self.score()
                if self.rank == 0:
                    d_, g_, r_, n_ = window.tolist()
                    print(f"it {it} d {d_ / n_:.4f} g {g_ / n_:.4f} r1 {r_ * self.args.r1_every / n_:.4f} "
                          f"modes {covered}/{MODES} high-quality {quality:.3f}", flush=True)
                window = zeros.clone()
        if self.rank == 0:
            torch.save(self.G_ema.state_dict(), "g_ema.pt")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--iters", type=int, default=450)
    p.add_argument("--batch", type=int, default=128)
    p.add_argument("--zdim", type=int, default=8)
    p.add_argument("--width", type=int, default=96)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--r1-gamma", type=float, default=0.2)
    p.add_argument("--r1-every", type=int, default=8)
    p.add_argument("--log-every", type=int, default=150)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    GanLoop(args, dist.get_rank(), dist.get_world_size()).run()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
