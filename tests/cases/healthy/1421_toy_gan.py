"""Two-dimensional GAN: generator and critic each have their own optimizer."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

Z = 8


def eight_gaussians(n=1024):
    g = torch.Generator().manual_seed(5)
    k = torch.randint(0, 8, (n,), generator=g)
    angle = k * (2 * torch.pi / 8)
    centre = torch.stack([angle.cos(), angle.sin()], 1) * 2
    return TensorDataset(centre + 0.1 * torch.randn(n, 2, generator=g))


def mlp(i, o, width=64):
    return nn.Sequential(nn.Linear(i, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, o))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    gen, disc = DDP(mlp(Z, 2)), DDP(mlp(2, 1))
    average = copy.deepcopy(gen.module).requires_grad_(False)
    g_opt = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.99))
    d_opt = torch.optim.Adam(disc.parameters(), lr=1e-3, betas=(0.5, 0.99))
    data = eight_gaussians()
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=64, sampler=sampler, drop_last=True)
    torch.manual_seed(77 + rank)

    for epoch in range(6):
        sampler.set_epoch(epoch)
        stats = torch.zeros(2)
        for (real,) in loader:
            fake = gen(torch.randn(len(real), Z))

            disc.requires_grad_(True)
            logits = disc(torch.cat([real, fake.detach()]))
            on_real, on_fake = logits.chunk(2)
            d_loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
            d_opt.zero_grad(set_to_none=True)
            d_loss.backward()
            d_opt.step()

            disc.requires_grad_(False)
            g_loss = F.softplus(-disc.module(fake)).mean()
            g_opt.zero_grad(set_to_none=True)
            g_loss.backward()
            g_opt.step()

            with torch.no_grad():
                for a, p in zip(average.parameters(), gen.module.parameters()):
                    a.lerp_(p, 0.05)
            stats += torch.stack([d_loss.detach(), g_loss.detach()])
        dist.all_reduce(stats)
        stats /= world * len(loader)
        if rank == 0:
            print(f"epoch {epoch}: critic {stats[0].item():.3f} generator {stats[1].item():.3f}")

    if rank == 0:
        os.makedirs("samples", exist_ok=True)
        with torch.no_grad():
            torch.save(average(torch.randn(256, Z)), "samples/final.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
