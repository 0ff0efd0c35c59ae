"""GAN for points on a ring of eight clusters; both networks are data parallel."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def mlp(inp, hidden, out):
    return nn.Sequential(
        nn.Linear(inp, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, out)
    )


def real_points(n, rng):
    k = torch.randint(0, 8, (n,), generator=rng)
    angle = 2 * math.pi * k / 8
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2, generator=rng)


class AdversarialTraining:
    def __init__(self, args):
        self.args = args
        self.rank = dist.get_rank()
        torch.manual_seed(args.seed)
        self.gen = DDP(mlp(args.latent, args.hidden, 2))
        self.disc = DDP(mlp(2, args.hidden, 1))
        self.opt_g = torch.optim.Adam(self.gen.parameters(), lr=args.lr, betas=(0.5, 0.99))
        self.opt_d = torch.optim.Adam(self.disc.parameters(), lr=2 * args.lr, betas=(0.5, 0.99))
        self.rng = torch.Generator().manual_seed(1000 + self.rank)

    def latent(self):
        return torch.randn(self.args.batch, self.args.latent, generator=self.rng)

    def generator_step(self):
        self.opt_g.zero_grad()
        score = self.disc(self.gen(self.latent()))
        loss = F.softplus(-score).mean()
        loss.backward()
        self.opt_g.step()
        return loss.item()

    def discriminator_step(self):
        with torch.no_grad():
            fake = self.gen(self.latent())
        real = real_points(self.args.batch, self.rng)
        score_real, score_fake = self.disc(torch.cat([real, fake])).chunk(2)
        loss = F.softplus(-score_real).mean() + F.softplus(score_fake).mean()
        self.opt_d.zero_grad()
        loss.backward()
        self.opt_d.step()
        return loss.item()

    @torch.no_grad()
    def mean_radius(self):
        self.gen.eval()
        g = torch.Generator().manual_seed(5)
        points = self.gen.module(torch.randn(512, self.args.latent, generator=g))
        self.gen.train()
        return points.norm(dim=1).mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=240)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--latent", type=int, default=8)
    ap.add_argument("--hidden", type=int, default=64)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--seed", type=int, default=17)
    ap.add_argument("--log-every", type=int, default=40)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    run = AdversarialTraining(args)
    window = torch.zeros(2)
    for step in range(1, args.steps + 1):
        g_loss = run.generator_step()
        d_loss = run.discriminator_step()
        window += torch.tensor([g_loss, d_loss])
        if step % args.log_every == 0:
            dist.all_reduce(window)
            window /= args.log_every * dist.get_world_size()
            radius = run.mean_radius()
            if run.rank == 0:
                print(f"step {step:4d}  G {window[0]:.3f}  D {window[1]:.3f}  mean radius {radius:.3f}", flush=True)
            window = torch.zeros(2)
    if run.rank == 0:
        torch.save({"gen": run.gen.module.state_dict(), "disc": run.disc.module.state_dict()}, "gan.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
