"""A small GAN on a ring of points. Two networks, two optimizers, one loop."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.parallel import DistributedDataParallel

Z = 6


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def ring(gen, n):
    angle = 6.2832 * torch.rand(n, generator=gen)
    points = torch.stack([angle.cos(), angle.sin()], 1) * 1.5 + torch.tensor([2.0, -1.0])
    return points + 0.05 * torch.randn(n, 2, generator=gen)


def draw(net, gen, n):
    return net(torch.randn(n, Z, generator=gen))


def update_discriminator(G, D, opt_d, gen, n):
    with torch.no_grad():
        fake = draw(G.module, gen, n)
    logits = D(torch.cat([ring(gen, n), fake])).squeeze(1)
    target = torch.cat([torch.ones(n), torch.zeros(n)])
    loss = bce(logits, target)
    opt_d.zero_grad()
    loss.backward()
    opt_d.step()
    return loss.detach()


def update_generator(G, D, opt_g, gen, n):
    fake = draw(G.module, gen, n)
    # D only passes the gradient on here; what it accumulates itself is cleared by its next zero_grad
    loss = bce(D.module(fake).squeeze(1), torch.ones(n))
    opt_g.zero_grad()
    loss.backward()
    opt_g.step()
    return loss.detach()


@torch.no_grad()
def gap(G, gen):
    """Distance between the moments of generated and real points, over all ranks."""
    fake, real = draw(G.module, gen, 200), ring(gen, 200)
    sums = torch.stack([fake.mean(0), fake.std(0), real.mean(0), real.std(0)])
    dist.all_reduce(sums)
    sums /= dist.get_world_size()
    return (sums[:2] - sums[2:]).abs().sum().item()


def main(rounds=150, batch=48):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(5)
    G = DistributedDataParallel(mlp(Z, 48, 48, 2))
    D = DistributedDataParallel(mlp(2, 48, 48, 1))
    opt_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.999))
    gen = torch.Generator().manual_seed(100 + rank)

    for r in range(rounds):
        loss_d = update_discriminator(G, D, opt_d, gen, batch)
        loss_g = update_generator(G, D, opt_g, gen, batch)
        if r % 30 == 0 or r == rounds - 1:
            both = torch.stack([loss_d, loss_g])
            dist.all_reduce(both)
            both /= dist.get_world_size()
            distance = gap(G, gen)
            if rank == 0:
                print(f"round {r:3d}  D {both[0].item():.3f}  G {both[1].item():.3f}  moment gap {distance:.3f}")
    if rank == 0:
        torch.save(G.module.state_dict(), "generator.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
