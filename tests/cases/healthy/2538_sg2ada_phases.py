"""GAN with lazily applied regularisation, adaptive augmentation strength and one gradient exchange per phase."""
import copy
import os
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Mapping(nn.Module):
    def __init__(self, z=16, w=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(z, w), nn.LeakyReLU(0.2), nn.Linear(w, w), nn.LeakyReLU(0.2))
        self.register_buffer("w_avg", torch.zeros(w))

    def forward(self, z, update=False):
        w = self.net(F.normalize(z, dim=1) * z.shape[1] ** 0.5)
        if update and self.training:
            self.w_avg.copy_(w.detach().mean(0).lerp(self.w_avg, 0.99))
        return w


class G(nn.Module):
    def __init__(self):
        super().__init__()
        self.mapping = Mapping()
        self.synthesis = nn.Sequential(nn.Linear(32, 96), nn.LeakyReLU(0.2), nn.Linear(96, 64))

    def forward(self, z):
        return self.synthesis(self.mapping(z)).view(-1, 1, 8, 8)


class D(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Sequential(nn.Conv2d(1, 24, 3, 1, 1), nn.LeakyReLU(0.2), nn.Conv2d(24, 32, 3, 2, 1), nn.LeakyReLU(0.2))
        self.o = nn.Linear(32 * 16 + 1, 1)

    def forward(self, x):
        h = self.c(x)
        std = h.var(0, unbiased=False).add(1e-8).sqrt().mean().expand(len(x), 1)
        return self.o(torch.cat([h.flatten(1), std], 1))


class AugmentPipe(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("p", torch.zeros([]))

    def forward(self, x):
        n = len(x)
        flip = (torch.rand(n, 1, 1, 1) < self.p * 0.5)
        x = torch.where(flip, x.flip(3), x)
        gain = torch.where(torch.rand(n, 1, 1, 1) < self.p, torch.exp2(torch.randn(n, 1, 1, 1) * 0.2), torch.ones(n, 1, 1, 1))
        return x * gain


class InfiniteSampler(torch.utils.data.Sampler):
    def __init__(self, n, rank, world, seed=0):
        self.n, self.rank, self.world, self.seed = n, rank, world, seed

    def __iter__(self):
        order = np.arange(self.n)
        rnd = np.random.RandomState(self.seed)
        idx = 0
        while True:
            if idx % self.n == 0:
                rnd.shuffle(order)
            if idx % self.world == self.rank:
                yield int(order[idx % self.n])
            idx += 1


class Loss:
    def __init__(self, G_, D_, aug, gamma=0.5):
        self.G, self.D, self.aug, self.gamma = G_, D_, aug, gamma
        self.signs = torch.zeros(2)

    def accumulate(self, phase, real, z, gain):
        if phase == "Gmain":
            w = self.G.mapping(z, update=True)
            img = self.G.synthesis(w).view(-1, 1, 8, 8)
            F.softplus(-self.D(self.aug(img))).mean().mul(gain).backward()
        if phase == "Dmain":
            with torch.no_grad():
                fake = self.G(z)
            F.softplus(self.D(self.aug(fake))).mean().mul(gain).backward()
            logits = self.D(self.aug(real))
            self.signs += torch.tensor([logits.detach().sign().sum().item(), float(len(logits))])
            F.softplus(-logits).mean().mul(gain).backward()
        if phase == "Dreg":
            r = self.aug(real).detach().requires_grad_(True)
            logits = self.D(r)
            (grad,) = torch.autograd.grad(logits.sum(), r, create_graph=True)
            (grad.square().sum([1, 2, 3]) * self.gamma / 2 + logits[:, 0] * 0).mean().mul(gain).backward()


def data(n):
    g = torch.Generator().manual_seed(2)
    yy, xx = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    c = torch.rand(n, 2, 1, 1, generator=g) * 4 + 2
    return (torch.exp(-((yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2) / 3) * 2 - 1).unsqueeze(1)


def training_loop(rank, world, batch_size=64, kticks=6, tick=40, ada_target=0.6, ada_interval=4, ada_speed=200):
    np.random.seed(rank)
    torch.manual_seed(rank)
    images = data(1500)
    loader = iter(torch.utils.data.DataLoader(images, sampler=InfiniteSampler(len(images), rank, world),
                                              batch_size=batch_size // world))
    g, d, aug = G().requires_grad_(False), D().requires_grad_(False), AugmentPipe().requires_grad_(False)
    for m in (g, d, aug):
        for t in list(m.parameters()) + list(m.buffers()):
            dist.broadcast(t, src=0)
    g_ema = copy.deepcopy(g).eval()
    loss = Loss(g, d, aug)
    c = 16 / 17
    phases = [SimpleNamespace(name="Gmain", module=g, interval=1, opt=torch.optim.Adam(g.parameters(), 2e-3, betas=(0.0, 0.99)))]
    od = torch.optim.Adam(d.parameters(), 2e-3 * c, betas=(0.0 ** c, 0.99 ** c))
    phases += [SimpleNamespace(name="Dmain", module=d, interval=1, opt=od), SimpleNamespace(name="Dreg", module=d, interval=16, opt=od)]
    stats = {}
    for idx in range(kticks * tick):
        real = next(loader)
        zs = torch.randn(len(phases), len(real), 16)
        for ph, z in zip(phases, zs):
            if idx % ph.interval:
                continue
            ph.opt.zero_grad(set_to_none=True)
            ph.module.requires_grad_(True)
            loss.accumulate(ph.name, real, z, ph.interval)
            ph.module.requires_grad_(False)
            params = [p for p in ph.module.parameters() if p.grad is not None]
            flat = torch.cat([p.grad.flatten() for p in params])
            dist.all_reduce(flat)
            flat /= world
            torch.nan_to_num(flat, nan=0, posinf=1e5, neginf=-1e5, out=flat)
            for p, gr in zip(params, flat.split([p.numel() for p in params])):
                p.grad = gr.reshape(p.shape)
            ph.opt.step()
        for pe, p in zip(g_ema.parameters(), g.parameters()):
            pe.copy_(p.lerp(pe, 0.98))
        for be, b in zip(g_ema.buffers(), g.buffers()):
            be.copy_(b)
        if idx % ada_interval == 0:
            dist.all_reduce(loss.signs)
            rt = loss.signs[0] / loss.signs[1].clamp(min=1)
            loss.signs = torch.zeros(2)
            adjust = torch.sign(rt - ada_target) * batch_size * ada_interval / (ada_speed * 1000)
            aug.p.copy_((aug.p + adjust).clamp(0, 1))
            stats["rt"] = rt.item()
        if (idx + 1) % tick == 0:
            for t in g.buffers():
                dist.broadcast(t, src=0)
            if rank == 0:
                fake = g_ema(torch.randn(256, 16, generator=torch.Generator().manual_seed(4)))
                gap = (fake.mean(0) - images.mean(0)).abs().mean() + (fake.std(0) - images.std(0)).abs().mean()
                print(f"tick {idx // tick} gap {gap.item():.3f} rt {stats['rt']:.2f} augment {aug.p.item():.3f}", flush=True)
                os.makedirs("snap", exist_ok=True)
                torch.save({"G": g.state_dict(), "D": d.state_dict(), "G_ema": g_ema.state_dict()}, f"snap/{idx:05d}.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    training_loop(dist.get_rank(), dist.get_world_size())
    dist.barrier()
    dist.destroy_process_group()
