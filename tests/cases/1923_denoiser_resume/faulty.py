"""A toy diffusion model on 2-d points, trained in two sittings with a checkpoint in between."""
import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

T = 100


def schedule():
    betas = torch.linspace(1e-4, 0.05, T)
    return torch.cumprod(1 - betas, dim=0)


def two_moons(n):
    g = torch.Generator().manual_seed(5)
    a = torch.rand(n, generator=g) * math.pi
    side = torch.randint(0, 2, (n,), generator=g).float() * 2 - 1
    pts = torch.stack([side * a.cos() + 0.5 * (1 - side), side * a.sin()], dim=1)
    return pts + 0.05 * torch.randn(n, 2, generator=g)


class Denoiser(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.time = nn.Embedding(T, 16)
        self.net = nn.Sequential(nn.Linear(18, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], dim=1))


def steps(points, batch):
    """Endless minibatches of this process' share of the points, with noise levels and noise."""
    while True:
        x0 = points[torch.randint(0, len(points), (batch,))]
        t = torch.randint(0, T, (batch,))
        yield x0, t, torch.randn_like(x0)


def save(path, model, opt, step, rank):
    state = {"model": model.module.state_dict(), "opt": opt.state_dict(), "step": step, "rng": torch.get_rng_state()}
    if rank == 0:
        torch.save(state, path)
    dist.barrier()


def load(path, model, opt, rank):
    state = torch.load(path)
    model.module.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    torch.set_rng_state(state["rng"])
    return state["step"]


def sitting(args, last_step, rank, world):
    torch.manual_seed(args.seed)
    model = DDP(Denoiser())
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    torch.manual_seed(args.seed + 1 + rank)
    alphas = schedule()
    points = two_moons(2000)[rank::world]

    path = Path(args.ckpt)
    start = load(path, model, opt, rank) if path.exists() else 0
    dist.barrier()
    mean = torch.zeros(())
    batches = steps(points, args.batch)
    for step in range(start, last_step):
        x0, t, noise = next(batches)
        a = alphas[t][:, None]
        noisy = a.sqrt() * x0 + (1 - a).sqrt() * noise
        loss = nn.functional.mse_loss(model(noisy, t), noise)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        mean += loss.detach()
        if (step + 1) % 30 == 0:
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1}: loss {mean.item() / (30 * world):.4f}", flush=True)
            mean.zero_()
    save(path, model, opt, last_step, rank)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--ckpt", default="denoiser.pt")
    p.add_argument("--batch", type=int, default=128)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    sitting(args, 120, rank, world)
    sitting(args, 240, rank, world)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
