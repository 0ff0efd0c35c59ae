"""Noise prediction on noisy rings and squares (a toy diffusion model)."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Shapes(Dataset):
    """Points of a ring or a square outline, 16 points a sample."""

    def __init__(self, n=640):
        g = torch.Generator().manual_seed(5)
        phase = torch.rand(n, 16, generator=g) * 2 * math.pi
        ring = torch.stack([phase.cos(), phase.sin()], -1)
        square = ring / ring.abs().amax(-1, keepdim=True)
        pick = torch.rand(n, 1, 1, generator=g) < 0.5
        self.points = torch.where(pick, ring, square).flatten(1)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, i):
        return self.points[i]


class Denoiser(nn.Module):
    def __init__(self, dim=32, width=256, steps=50):
        super().__init__()
        self.steps = steps
        self.time = nn.Embedding(steps, 64)
        self.body = nn.Sequential(nn.Linear(dim + 64, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, dim))
        self.register_buffer("alpha_bar", torch.cumprod(1 - torch.linspace(1e-3, 0.12, steps), 0))

    def predict(self, noisy, t):
        return self.body(torch.cat([noisy, self.time(t)], 1))

    def training_step(self, clean, gen):
        t = torch.randint(0, self.steps, (len(clean),), generator=gen)
        noise = torch.randn(clean.shape, generator=gen)
        a = self.alpha_bar[t].unsqueeze(1)
        return nn.functional.mse_loss(self.predict(a.sqrt() * clean + (1 - a).sqrt() * noise, t), noise)

    def forward(self, clean, gen):
        return self.training_step(clean, gen)

    @torch.no_grad()
    def sample(self, n, gen):
        x = torch.randn(n, 32, generator=gen)
        for t in reversed(range(self.steps)):
            a = self.alpha_bar[t]
            eps = self.predict(x, torch.full((n,), t))
            clean = ((x - (1 - a).sqrt() * eps) / a.sqrt()).clamp(-2, 2)
            prev = self.alpha_bar[t - 1] if t else torch.tensor(1.0)
            x = prev.sqrt() * clean + (1 - prev).sqrt() * eps
        return x


class Engine(DistributedDataParallel):
    """Keeps the attributes and methods of the model reachable after wrapping."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def radius_error(points):
    r = points.view(len(points), 16, 2).norm(dim=-1)
    return ((r - 1.1).abs() - 0.3).clamp(min=0).mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=12)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    data = Shapes()
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler, drop_last=True)
    engine = Engine(Denoiser())
    opt = torch.optim.AdamW(engine.parameters(), lr=args.lr)
    gen = torch.Generator().manual_seed(1000 + rank)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        engine.train()
        total = torch.zeros(1)
        for clean in loader:
            loss = engine.training_step(clean, gen)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch:2d}  loss {total.item() / len(loader) / dist.get_world_size():.4f}", flush=True)

    engine.eval()
    drawn = engine.sample(128, torch.Generator().manual_seed(77))
    if rank == 0:
        print(f"drawn {len(drawn)} shapes, off the outline by {radius_error(drawn):.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
