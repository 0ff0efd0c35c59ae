"""GAN on 2-D rings with manual gradient averaging."""
import argparse
import math

import torch
import torch.distributed as dist
from torch import nn


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def average_gradients(module):
    for p in module.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


class RingGAN:
    def __init__(self, args):
        torch.manual_seed(args.seed)
        self.args = args
        self.G, self.D = mlp(4, 48, 48, 2), mlp(2, 48, 48, 1)
        self.opt_g = torch.optim.Adam(self.G.parameters(), lr=args.lr, betas=(0.5, 0.9))
        self.opt_d = torch.optim.Adam(self.D.parameters(), lr=args.lr, betas=(0.5, 0.9))
        self.bce = nn.BCEWithLogitsLoss()
        self.rng = torch.Generator().manual_seed(1000 * args.seed + dist.get_rank())

    def real(self, n):
        a = torch.rand(n, generator=self.rng) * 2 * math.pi
        r = 1 + 0.05 * torch.randn(n, generator=self.rng)
        return torch.stack([r * a.cos(), r * a.sin()], 1)

    def fake(self, n):
        return self.G(torch.randn(n, 4, generator=self.rng))

    def step_d(self, n):
        self.opt_d.zero_grad()
        ones, zeros = torch.ones(n, 1), torch.zeros(n, 1)
        loss = self.bce(self.D(self.real(n)), ones) + self.bce(self.D(self.fake(n).detach()), zeros)
        loss.backward()
        average_gradients(self.D)
        self.opt_d.step()
        return loss.detach()

    def step_g(self, n):
        self.opt_g.zero_grad()
        loss = self.bce(self.D(self.fake(n)), torch.ones(n, 1))
        loss.backward()
        average_gradients(self.G)
        self.opt_g.step()
        return loss.detach()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    gan = RingGAN(args)
    for step in range(args.steps):
        both = torch.stack([gan.step_d(args.batch), gan.step_g(args.batch)])
        if (step + 1) % 15 == 0:
            dist.all_reduce(both)
            d, g = (both / dist.get_world_size()).tolist()
            if dist.get_rank() == 0:
                print(f"step {step + 1}: D {d:.4f} G {g:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
