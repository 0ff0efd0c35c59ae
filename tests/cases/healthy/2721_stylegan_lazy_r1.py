import argparse
import json
import math
import os
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import autograd, nn, optim
from torch.utils import data


def get_rank():
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def reduce_loss_dict(loss_dict):
    if get_world_size() < 2:
        return loss_dict
    with torch.no_grad():
        keys = sorted(loss_dict)
        losses = torch.stack([loss_dict[k].detach().reshape(()) for k in keys])
        dist.reduce(losses, dst=0)
        if get_rank() == 0:
            losses /= get_world_size()
        return {k: v for k, v in zip(keys, losses)}


class Blobs(data.Dataset):
    """16x16 pictures of one soft blob near the middle."""

    def __init__(self, n=2048, size=16, seed=5):
        g = torch.Generator().manual_seed(seed)
        yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        c = size / 2 + torch.randn(n, 2, generator=g)
        d = (yy[None] - c[:, 0, None, None]) ** 2 + (xx[None] - c[:, 1, None, None]) ** 2
        self.x = (torch.exp(-d / 8.0) * 2 - 1).unsqueeze(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


class Generator(nn.Module):
    def __init__(self, latent, ch=32):
        super().__init__()
        self.mapping = nn.Sequential(nn.Linear(latent, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2))
        self.const = nn.Parameter(torch.randn(1, ch, 4, 4))
        self.style1 = nn.Linear(64, ch)
        self.conv1 = nn.Conv2d(ch, ch, 3, padding=1)
        self.style2 = nn.Linear(64, ch)
        self.conv2 = nn.Conv2d(ch, ch, 3, padding=1)
        self.to_rgb = nn.Conv2d(ch, 1, 1)

    def forward(self, styles, inject=None):
        ws = [self.mapping(s) for s in styles]
        w1 = ws[0]
        w2 = ws[1] if len(ws) > 1 else ws[0]
        x = self.const.repeat(w1.shape[0], 1, 1, 1)
        x = F.interpolate(x, scale_factor=2) * (1 + self.style1(w1))[:, :, None, None]
        x = F.leaky_relu(self.conv1(x), 0.2)
        x = F.interpolate(x, scale_factor=2) * (1 + self.style2(w2))[:, :, None, None]
        return torch.tanh(self.to_rgb(F.leaky_relu(self.conv2(x), 0.2)))


class Discriminator(nn.Module):
    def __init__(self, ch=32):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, ch, 3, stride=2, padding=1), nn.LeakyReLU(0.2),
            nn.Conv2d(ch, ch, 3, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Flatten())
        self.out = nn.Linear(ch * 16, 1)

    def forward(self, x):
        return self.out(self.body(x))


def requires_grad(model, flag=True):
    for p in model.parameters():
        p.requires_grad = flag


def accumulate(m1, m2, decay=0.99):
    p1, p2 = dict(m1.named_parameters()), dict(m2.named_parameters())
    for k in p1:
        p1[k].data.mul_(decay).add_(p2[k].data, alpha=1 - decay)


def sample_data(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for batch in loader:
            yield batch
        epoch += 1


def mixing_noise(batch, latent, prob):
    if prob > 0 and random.random() < prob:
        return list(torch.randn(2, batch, latent).unbind(0))
    return [torch.randn(batch, latent)]


def train(args, loader, sampler, generator, discriminator, g_optim, d_optim, g_ema):
    loader = sample_data(loader, sampler)
    r1_loss = torch.tensor(0.0)
    history = []
    sample_z = torch.randn(16, args.latent)
    for i in range(args.iter):
        real = next(loader)

        requires_grad(generator, False)
        requires_grad(discriminator, True)
        fake = generator(mixing_noise(args.batch, args.latent, args.mixing))
        fake_pred = discriminator(fake)
        real_pred = discriminator(real)
        d_loss = F.softplus(-real_pred).mean() + F.softplus(fake_pred).mean()
        discriminator.zero_grad()
        d_loss.backward()
        d_optim.step()

        if i % args.d_reg_every == 0:
            real.requires_grad = True
            real_pred = discriminator(real)
            grad_real, = autograd.grad(real_pred.sum(), real, create_graph=True)
            r1_loss = grad_real.pow(2).reshape(real.shape[0], -1).sum(1).mean()
            discriminator.zero_grad()
            (args.r1 / 2 * r1_loss * args.d_reg_every + 0 * real_pred[0]).sum().backward()
            d_optim.step()

        requires_grad(generator, True)
        requires_grad(discriminator, False)
        fake_pred = discriminator(generator(mixing_noise(args.batch, args.latent, args.mixing)))
        g_loss = F.softplus(-fake_pred).mean()
        generator.zero_grad()
        g_loss.backward()
        g_optim.step()
        accumulate(g_ema, generator.module)

        red = reduce_loss_dict({"d": d_loss, "g": g_loss, "r1": r1_loss})
        if get_rank() == 0 and i % 20 == 0:
            history.append({k: round(v.item(), 4) for k, v in red.items()})
            print(f"[{i:04d}]", history[-1], flush=True)
    if get_rank() == 0:
        with torch.no_grad():
            sample = g_ema([sample_z])
        os.makedirs("checkpoint", exist_ok=True)
        torch.save({"g": generator.module.state_dict(), "d": discriminator.module.state_dict(),
                    "g_ema": g_ema.state_dict(), "g_optim": g_optim.state_dict(),
                    "d_optim": d_optim.state_dict()}, "checkpoint/last.pt")
        with open("checkpoint/history.json", "w") as f:
            json.dump(history, f)
        print("sample mean/std", sample.mean().item(), sample.std().item())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iter", type=int, default=120)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--r1", type=float, default=1.0)
    ap.add_argument("--d_reg_every", type=int, default=8)
    ap.add_argument("--mixing", type=float, default=0.9)
    ap.add_argument("--lr", type=float, default=0.002)
    args = ap.parse_args()
    args.latent = 32
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    generator, discriminator, g_ema = Generator(args.latent), Discriminator(), Generator(args.latent)
    g_ema.eval()
    accumulate(g_ema, generator, 0)
    generator = nn.parallel.DistributedDataParallel(generator, broadcast_buffers=False)
    discriminator = nn.parallel.DistributedDataParallel(discriminator, broadcast_buffers=False)
    torch.manual_seed(1000 + get_rank())
    random.seed(1000 + get_rank())
    ratio = args.d_reg_every / (args.d_reg_every + 1)
    g_optim = optim.Adam(generator.parameters(), lr=args.lr, betas=(0.0, 0.99))
    d_optim = optim.Adam(discriminator.parameters(), lr=args.lr * ratio, betas=(0.0, 0.99 ** ratio))
    ds = Blobs()
    sampler = data.distributed.DistributedSampler(ds, shuffle=True)
    loader = data.DataLoader(ds, batch_size=args.batch, sampler=sampler, drop_last=True)
    train(args, loader, sampler, generator, discriminator, g_optim, d_optim, g_ema)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
