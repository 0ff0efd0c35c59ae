"""GAN with two DDP modules; the generator looks at the plain discriminator."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def real_points(n, gen):
    x = torch.randn(n, 2, generator=gen)
    return 0.3 * x + torch.where(torch.rand(n, 1, generator=gen) < 0.5, 1.0, -1.0)


def main(steps=60, n=24):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(2)
    g_net = DDP(nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 2)))
    d_net = DDP(nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
    g_opt = torch.optim.Adam(g_net.parameters(), lr=1e-3, betas=(0.0, 0.9))
    d_opt = torch.optim.Adam(d_net.parameters(), lr=2e-3, betas=(0.0, 0.9))
    stream = torch.Generator().manual_seed(900 + rank)  # endless data, an own stream per process
    torch.manual_seed(50 + rank)
    for step in range(steps):
        with torch.no_grad():
            fake = g_net(torch.randn(n, 3))
        score = d_net(torch.cat([real_points(n, stream), fake]))
        d_loss = F.relu(1 - score[:n]).mean() + F.relu(1 + score[n:]).mean()
        d_opt.zero_grad()
        d_loss.backward()
        d_opt.step()
        if step % 2 == 0:  # two discriminator steps per generator step
            g_loss = -d_net.module(g_net(torch.randn(n, 3))).mean()
            g_opt.zero_grad()
            g_loss.backward()
            g_opt.step()
        if rank == 0 and step % 20 == 19:
            print(f"step {step}: D {d_loss.item():.3f}  G {g_loss.item():.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
