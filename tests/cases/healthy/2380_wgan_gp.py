"""WGAN with gradient penalty on eight Gaussians, critic and generator each in their own DDP."""
import argparse
import math

import torch
import torch.distributed as dist
from torch import autograd, nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP


class Generator(nn.Module):
    def __init__(self, nz, hidden=64):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(nz, hidden), nn.ReLU(True), nn.Linear(hidden, hidden), nn.ReLU(True),
                                  nn.Linear(hidden, 2))

    def forward(self, z):
        return self.main(z)


class Critic(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(2, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, hidden),
                                  nn.LeakyReLU(0.2), nn.Linear(hidden, 1))

    def forward(self, x):
        return self.main(x).view(-1)


def inf_train_gen(batch, rank, world, seed):
    """Endless stream; every process draws its own points."""
    g = torch.Generator().manual_seed(seed * world + rank)
    angle = torch.arange(8) * (2 * math.pi / 8)
    centers = torch.stack([angle.cos(), angle.sin()], 1) * 2
    while True:
        k = torch.randint(0, 8, (batch,), generator=g)
        yield (centers[k] + 0.05 * torch.randn(batch, 2, generator=g)) / 1.414


def critic_step(netD, netG, optD, real, noise, lam):
    with torch.no_grad():
        fake = netG(noise)
    eps = torch.rand(real.size(0), 1)
    mixed = (eps * real + (1 - eps) * fake).requires_grad_(True)
    score = netD(torch.cat([real, fake, mixed]))
    d_real, d_fake, d_mixed = score.chunk(3)
    grad = autograd.grad(d_mixed.sum(), mixed, create_graph=True)[0]
    penalty = ((grad.norm(2, dim=1) - 1) ** 2).mean() * lam
    wasserstein = d_real.mean() - d_fake.mean()
    optD.zero_grad(set_to_none=True)
    (penalty - wasserstein).backward()
    optD.step()
    return wasserstein.detach(), penalty.detach()


def generator_step(netD, netG, optG, noise):
    for p in netD.parameters():
        p.requires_grad_(False)
    loss = -netD.module(netG(noise)).mean()
    optG.zero_grad(set_to_none=True)
    loss.backward()
    optG.step()
    for p in netD.parameters():
        p.requires_grad_(True)
    return loss.detach()


@torch.no_grad()
def sliced_wasserstein(a, b, n_proj=64):
    theta = torch.linspace(0, math.pi, n_proj)
    dirs = torch.stack([theta.cos(), theta.sin()])
    return ((a @ dirs).sort(0).values - (b @ dirs).sort(0).values).abs().mean()


@torch.no_grad()
def evaluate(netG, stream, nz, n=256):
    fake = netG.module(torch.randn(n, nz))
    real = next(stream)
    packed = torch.cat([fake, real[:n]], 1)
    parts = [torch.empty_like(packed) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, packed)
    packed = torch.cat(parts)
    return sliced_wasserstein(packed[:, :2], packed[:, 2:]).item()


def reduce_mean(d):
    t = torch.stack(list(d.values()))
    dist.all_reduce(t)
    return dict(zip(d, (t / dist.get_world_size()).tolist()))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nz", type=int, default=8)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--iters", type=int, default=250)
    parser.add_argument("--critic-iters", type=int, default=4)
    parser.add_argument("--lambda-gp", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=9)
    opt = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(opt.seed)
    netG, netD = DDP(Generator(opt.nz)), DDP(Critic())
    torch.manual_seed(opt.seed + 1000 + rank)
    optG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(0.5, 0.9))
    optD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(0.5, 0.9))
    data = inf_train_gen(opt.batch, rank, world, opt.seed)
    holdout = inf_train_gen(256, rank, world, opt.seed + 500)

    for it in range(opt.iters):
        for _ in range(opt.critic_iters):
            w, gp = critic_step(netD, netG, optD, next(data), torch.randn(opt.batch, opt.nz), opt.lambda_gp)
        g = generator_step(netD, netG, optG, torch.randn(opt.batch, opt.nz))
        if it % 50 == 0 or it == opt.iters - 1:
            stats = reduce_mean({"wasserstein": w, "penalty": gp, "generator": g})
            swd = evaluate(netG, holdout, opt.nz)
            if rank == 0:
                print(f"iter {it:4d} " + " ".join(f"{k} {v:+.4f}" for k, v in stats.items()) + f" swd {swd:.4f}")

    if rank == 0:
        torch.save({"G": netG.module.state_dict(), "D": netD.module.state_dict(), "optG": optG.state_dict(),
                    "optD": optD.state_dict()}, "wgan.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
