"""WGAN-GP on points: torch.autograd.grad is used for the penalty only, five critic steps per generator step."""
import argparse
import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def ring_of_gaussians(n=640):
    g = torch.Generator().manual_seed(0)
    k = torch.randint(8, (n,), generator=g)
    angle = k * 6.2832 / 8
    return TensorDataset(torch.stack([2 * angle.cos(), 2 * angle.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g))


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, o))


class CriticLoss(nn.Module):
    """Critic and penalty in one module, so that one DDP forward covers everything that is differentiated."""

    def __init__(self, critic, weight=10.0):
        super().__init__()
        self.critic, self.weight = critic, weight

    def forward(self, real, fake):
        eps = torch.rand(len(real), 1)
        mixed = (eps * real + (1 - eps) * fake).requires_grad_()
        slope = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)[0].norm(2, dim=1)
        w = self.critic(real).mean() - self.critic(fake).mean()
        return -w + self.weight * (slope - 1).square().mean(), w.detach()


class GeneratorLoss(nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def forward(self, z):
        return self.generator(z)


def endless(loader, sampler):
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=10)
    ap.add_argument("--critic-steps", type=int, default=5)
    ap.add_argument("--z", type=int, default=4)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    critic, generator = mlp(2, 1), mlp(args.z, 2)
    d_loss, g_net = DDP(CriticLoss(critic)), DDP(GeneratorLoss(generator))
    torch.manual_seed(10 + rank)
    opt_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    data = ring_of_gaussians()
    sampler = DistributedSampler(data)
    stream = endless(DataLoader(data, 32, sampler=sampler), sampler)
    for it in range(args.iterations):
        for _ in range(args.critic_steps):
            (real,) = next(stream)
            with torch.no_grad():
                fake = generator(torch.randn(len(real), args.z))
            opt_d.zero_grad()
            loss, distance = d_loss(real, fake)
            loss.backward()
            opt_d.step()
        critic.requires_grad_(False)  # the plain module is used below, its DDP wrapper is not involved
        opt_g.zero_grad()
        (-critic(g_net(torch.randn(32, args.z))).mean()).backward()
        opt_g.step()
        critic.requires_grad_(True)
        dist.all_reduce(distance)
        if rank == 0 and it % 3 == 0:
            print(f"iteration {it}: estimated distance {distance.item() / dist.get_world_size():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
