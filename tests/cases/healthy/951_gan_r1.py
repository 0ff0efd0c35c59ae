"""Small GAN on 2-D rings: two DDP networks, R1 penalty, noise of its own per rank."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, BATCH, Z, R1_EVERY = 60, 64, 8, 4


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(Z, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 2))

    def forward(self, z):
        return self.net(z)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def rings(n, gen):
    radius = torch.where(torch.rand(n, generator=gen) < 0.5, 1.0, 2.0)
    angle = torch.rand(n, generator=gen) * 6.2831853
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1) + 0.05 * torch.randn(n, 2, generator=gen)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    gen_net, critic = Generator(), Critic()
    averaged = copy.deepcopy(gen_net).requires_grad_(False)
    gen_ddp, critic_ddp = DDP(gen_net), DDP(critic)
    opt_g = torch.optim.Adam(gen_ddp.parameters(), lr=1e-3, betas=(0.0, 0.99))
    opt_d = torch.optim.Adam(critic_ddp.parameters(), lr=1e-3, betas=(0.0, 0.99))

    # from here on every rank draws its own noise and its own reals: the stream is endless, so there is no sampler
    torch.manual_seed(1000 + rank)
    stream = torch.Generator().manual_seed(77 + rank)

    for step in range(STEPS):
        real = rings(BATCH, stream)
        with torch.no_grad():
            fake = gen_ddp(torch.randn(BATCH, Z))
        penalise = step % R1_EVERY == 0
        real.requires_grad_(penalise)
        scores = critic_ddp(torch.cat([real, fake]))
        loss_d = F.softplus(-scores[:BATCH]).mean() + F.softplus(scores[BATCH:]).mean()
        if penalise:
            (grad,) = torch.autograd.grad(scores[:BATCH].sum(), real, create_graph=True)
            loss_d = loss_d + 0.5 * R1_EVERY * grad.square().sum(1).mean()
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()

        # the critic's gradients of this pass are thrown away by the next opt_d.zero_grad()
        loss_g = F.softplus(-critic_ddp(gen_ddp(torch.randn(BATCH, Z)))).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()

        with torch.no_grad():
            decay = min(0.99, (1 + step) / (10 + step))
            for slow, fast in zip(averaged.parameters(), gen_net.parameters()):
                slow.lerp_(fast, 1 - decay)

        if step % 20 == 19:
            report = torch.stack([loss_d.detach(), loss_g.detach()])
            dist.all_reduce(report)
            report /= dist.get_world_size()
            if rank == 0:
                print(f"step {step + 1}: critic {report[0]:.3f} generator {report[1]:.3f}")

    if rank == 0:
        fixed = torch.randn(512, Z, generator=torch.Generator().manual_seed(5))
        with torch.no_grad():
            points = averaged(fixed)
        print("mean radius of 512 samples", round(points.norm(dim=1).mean().item(), 3))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
