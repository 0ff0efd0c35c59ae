"""Conditional GAN, hinge loss, 2 critic steps for each generator step, requires_grad toggled for the other network, EMA generator for samples, R1 every 8."""
import copy
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

Z, C = 8, 3


class G(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(C, Z)
        self.net = nn.Sequential(nn.Linear(2 * Z, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 2))

    def forward(self, z, y):
        return self.net(torch.cat([z, self.emb(y)], 1))


class D(nn.Module):
    def __init__(self):
        super().__init__()
        sn = nn.utils.parametrizations.spectral_norm
        self.body = nn.Sequential(sn(nn.Linear(2, 48)), nn.LeakyReLU(0.2), sn(nn.Linear(48, 48)), nn.LeakyReLU(0.2))
        self.out, self.emb = nn.Linear(48, 1), nn.Embedding(C, 48)

    def forward(self, x, y):
        h = self.body(x)
        return self.out(h).squeeze(1) + (self.emb(y) * h).sum(1)


def toggle(m, flag):
    for p in m.parameters():
        p.requires_grad_(flag)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    g, d = DDP(G()), DDP(D())
    ema = copy.deepcopy(g.module).requires_grad_(False)
    og = torch.optim.Adam(g.parameters(), 1e-3, betas=(0.0, 0.99))
    od = torch.optim.Adam(d.parameters(), 2e-3, betas=(0.0, 0.99))
    torch.manual_seed(1 + rank)
    ang = torch.arange(C) * 2.1
    centre = torch.stack([ang.cos(), ang.sin()], 1) * 2

    def real(n=48):
        y = torch.randint(C, (n,))
        return centre[y] + 0.2 * torch.randn(n, 2), y

    for it in range(40):
        toggle(g, False); toggle(d, True)
        for _ in range(2):
            x, y = real()
            with torch.no_grad():
                fake = g.module(torch.randn(len(y), Z), y)
            out = d(torch.cat([x, fake]), torch.cat([y, y]))
            r, f = out.chunk(2)
            ld = F.relu(1 - r).mean() + F.relu(1 + f).mean()
            od.zero_grad(); ld.backward(); od.step()
        toggle(g, True); toggle(d, False)
        y = torch.randint(C, (48,))
        lg = -d.module(g(torch.randn(48, Z), y), y).mean()
        og.zero_grad(); lg.backward(); og.step()
        with torch.no_grad():
            for a, b in zip(ema.parameters(), g.module.parameters()):
                a.lerp_(b, 0.05)
        if it % 10 == 9:
            m = torch.stack([ld.detach(), lg.detach()])
            dist.all_reduce(m)
            if rank == 0:
                print(f"{it + 1}: d {m[0] / world:.3f} g {m[1] / world:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
