"""WGAN with gradient penalty on a ring of Gaussians: double backward, two optimizers, an EMA generator.

The gradients are averaged by hand after each backward (DDP does not go with autograd.grad of a
penalty). The critic is frozen while the generator is updated. Noise differs between ranks.
"""
import copy
import math

import torch
import torch.distributed as dist
import torch.nn as nn

MODES, Z, B, CRITIC = 6, 8, 64, 3


def real_batch(n, gen):
    k = torch.randint(MODES, (n,), generator=gen)
    a = k * (2 * math.pi / MODES)
    return torch.stack([a.cos(), a.sin()], 1) * 1.5 + 0.1 * torch.randn(n, 2, generator=gen)


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2),
                         nn.Linear(64, o))


def sync(params, world):
    work = []
    for p in params:
        work.append(dist.all_reduce(p.grad, async_op=True))
    for w in work:
        w.wait()
    for p in params:
        p.grad.div_(world)


def penalty(critic, real, fake, gen):
    eps = torch.rand(len(real), 1, generator=gen)
    mid = (eps * real + (1 - eps) * fake).requires_grad_(True)
    (g,) = torch.autograd.grad(critic(mid).sum(), mid, create_graph=True)
    return (g.norm(dim=1) - 1).pow(2).mean()


def quality(gen_net, gen):
    gen_net.eval()
    with torch.no_grad():
        s = gen_net(torch.randn(1500, Z, generator=gen))
    a = torch.arange(MODES) * (2 * math.pi / MODES)
    c = torch.stack([a.cos(), a.sin()], 1) * 1.5
    d, which = torch.cdist(s, c).min(1)
    return torch.tensor([d.sum(), float(len(d))]), torch.bincount(which[d < 0.4], minlength=MODES)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    G, D = mlp(Z, 2), mlp(2, 1)
    ema = copy.deepcopy(G).requires_grad_(False)
    for net in (G, D):
        for p in net.parameters():
            dist.broadcast(p.data, src=0)
    rng = torch.Generator().manual_seed(700 + rank)
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.0, 0.9))
    opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.0, 0.9))
    before, _ = quality(ema, torch.Generator().manual_seed(rank))
    dist.all_reduce(before)
    for it in range(350):
        D.requires_grad_(True)
        for _ in range(CRITIC):
            real = real_batch(B, rng)
            with torch.no_grad():
                fake = G(torch.randn(B, Z, generator=rng))
            loss_d = D(fake).mean() - D(real).mean() + 1.0 * penalty(D, real, fake, rng)
            opt_d.zero_grad()
            loss_d.backward()
            sync([p for p in D.parameters() if p.grad is not None], world)
            opt_d.step()
        D.requires_grad_(False)
        loss_g = -D(G(torch.randn(B, Z, generator=rng))).mean()
        opt_g.zero_grad()
        loss_g.backward()
        sync(list(G.parameters()), world)
        opt_g.step()
        decay = min(0.99, (1 + it) / (10 + it))
        with torch.no_grad():
            for e, p in zip(ema.parameters(), G.parameters()):
                e.lerp_(p, 1 - decay)
        if rank == 0 and it % 100 == 99:
            print(f"it {it} critic {loss_d.item():.3f} gen {loss_g.item():.3f}", flush=True)
    after, cover = quality(ema, torch.Generator().manual_seed(5000 + rank))
    dist.all_reduce(after)
    dist.all_reduce(cover)
    d0, d1 = (before[0] / before[1]).item(), (after[0] / after[1]).item()
    if rank == 0:
        print(f"distance to next mode {d0:.3f} -> {d1:.3f}; hits per mode {cover.tolist()}")
        torch.save({"ema": ema.state_dict(), "critic": D.state_dict()}, "wgan.pt")
    assert d1 < 0.6 * d0
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
