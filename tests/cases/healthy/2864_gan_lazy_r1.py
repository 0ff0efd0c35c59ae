"""Two-network adversarial training with lazy R1, path-wise requires_grad switches and a generator average."""
import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import autograd, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Generator(nn.Module):
    def __init__(self, latent=8, width=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(latent, width), nn.LeakyReLU(0.2), nn.Linear(width, width),
                                 nn.LeakyReLU(0.2), nn.Linear(width, 2))

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, width), nn.LeakyReLU(0.2), nn.Linear(width, width),
                                 nn.LeakyReLU(0.2), nn.Linear(width, 1))

    def forward(self, x):
        return self.net(x)


def requires_grad(model, flag):
    for p in model.parameters():
        p.requires_grad = flag


@torch.no_grad()
def accumulate(target, source, decay):
    for a, b in zip(target.parameters(), source.parameters()):
        a.mul_(decay).add_(b, alpha=1 - decay)


def reduce_loss_dict(losses):
    names = sorted(losses)
    values = torch.stack([losses[k].detach() for k in names])
    dist.reduce(values, dst=0)
    if dist.get_rank() == 0:
        values /= dist.get_world_size()
    return dict(zip(names, values))


def ring(n):
    which = torch.randint(0, 8, (n,)) * (6.28318 / 8)
    return torch.stack([which.cos(), which.sin()], 1) + 0.05 * torch.randn(n, 2)


def sample_data(batch):
    while True:
        yield ring(batch)


def d_r1(real_pred, real):
    grad, = autograd.grad(real_pred.sum(), real, create_graph=True)
    return grad.pow(2).sum(1).mean()


def train(args, loader, generator, discriminator, g_optim, d_optim, g_ema):
    g_module = generator.module
    d_module = discriminator.module
    decay = 0.5 ** (args.batch * dist.get_world_size() / 2000)
    sample_z = torch.randn(64, args.latent)
    losses = {"r1": torch.zeros(())}
    for i in range(args.iter):
        real = next(loader)
        requires_grad(generator, False)
        requires_grad(discriminator, True)
        fake = generator(torch.randn(args.batch, args.latent))
        out = discriminator(torch.cat([fake, real]))
        fake_pred, real_pred = out.chunk(2)
        losses["d"] = F.softplus(-real_pred).mean() + F.softplus(fake_pred).mean()
        discriminator.zero_grad()
        losses["d"].backward()
        d_optim.step()

        if i % args.d_reg_every == 0:
            real = real.detach().requires_grad_(True)
            real_pred = discriminator(real)
            r1 = d_r1(real_pred, real)
            discriminator.zero_grad()
            (args.r1 / 2 * r1 * args.d_reg_every + 0 * real_pred[0].sum()).backward()
            d_optim.step()
            losses["r1"] = r1

        requires_grad(generator, True)
        requires_grad(discriminator, False)
        fake = generator(torch.randn(args.batch, args.latent))
        losses["g"] = F.softplus(-discriminator(fake)).mean()
        generator.zero_grad()
        losses["g"].backward()
        g_optim.step()
        accumulate(g_ema, g_module, decay)

        reduced = reduce_loss_dict(losses)
        if dist.get_rank() == 0 and (i + 1) % 40 == 0:
            print(f"{i + 1}: " + " ".join(f"{k} {v.item():.4f}" for k, v in reduced.items()), flush=True)
            with torch.no_grad():
                spread = g_ema(sample_z).norm(dim=1).mean().item()
            os.makedirs("gan", exist_ok=True)
            torch.save({"g": g_module.state_dict(), "d": d_module.state_dict(), "g_ema": g_ema.state_dict(),
                        "g_optim": g_optim.state_dict(), "d_optim": d_optim.state_dict(), "spread": spread},
                       f"gan/{i + 1:06d}.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--iter", type=int, default=120)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--latent", type=int, default=8)
    parser.add_argument("--r1", type=float, default=1.0)
    parser.add_argument("--d-reg-every", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    generator, discriminator = Generator(args.latent), Discriminator()
    g_ema = copy.deepcopy(generator).eval()
    requires_grad(g_ema, False)
    d_ratio = args.d_reg_every / (args.d_reg_every + 1)
    g_optim = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.0, 0.99))
    d_optim = torch.optim.Adam(discriminator.parameters(), lr=2e-3 * d_ratio, betas=(0.0, 0.99 ** d_ratio))
    generator = DDP(generator, broadcast_buffers=False)
    discriminator = DDP(discriminator, broadcast_buffers=False)
    torch.manual_seed(1000 + dist.get_rank())
    train(args, sample_data(args.batch), generator, discriminator, g_optim, d_optim, g_ema)
    dist.barrier()
    dist.destroy_process_group()
