"""Denoiser for 2-D points. A job is cut into segments; each segment resumes from the last checkpoint."""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Config:
    segments: int = 3
    steps_per_segment: int = 40
    batch: int = 64
    lr: float = 2e-3
    timesteps: int = 50
    seed: int = 1234
    folder: str = "diffusion_ckpt"


class Denoiser(nn.Module):
    def __init__(self, timesteps, width=96):
        super().__init__()
        self.time = nn.Embedding(timesteps, width)
        self.inp = nn.Linear(2, width)
        self.body = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, t):
        return self.body(self.inp(x) + self.time(t))


class Checkpointer:
    def __init__(self, folder, rank):
        self.folder = folder
        self.rank = rank
        if rank == 0:
            os.makedirs(folder, exist_ok=True)
        dist.barrier()

    def path(self, name):
        return os.path.join(self.folder, name)

    def save(self, model, optimizer, step):
        torch.save({"torch": torch.get_rng_state()}, self.path(f"rng_{self.rank}.pt"))
        if self.rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, self.path("last.pt"))
        dist.barrier()

    def load(self, model, optimizer):
        state = torch.load(self.path("last.pt"), map_location="cpu")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        rng = torch.load(self.path(f"rng_{self.rank}.pt"))
        torch.set_rng_state(rng["torch"])
        return state["step"]


def make_shard(rank, world, n=2048):
    g = torch.Generator().manual_seed(99)
    angle = torch.rand(n, generator=g) * 6.2832
    points = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g)
    return points[rank::world]


def train_segment(cfg, segment, shard, ckpt, rank):
    model = DDP(Denoiser(cfg.timesteps))
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    step = ckpt.load(model, optimizer) if segment > 0 else 0

    alphas = torch.cumprod(1 - torch.linspace(1e-3, 0.15, cfg.timesteps), 0)
    running = torch.zeros(1)
    for _ in range(cfg.steps_per_segment):
        pick = torch.randint(0, len(shard), (cfg.batch,))
        clean = shard[pick]
        t = torch.randint(0, cfg.timesteps, (cfg.batch,))
        noise = torch.randn_like(clean)
        a = alphas[t].unsqueeze(1)
        noisy = a.sqrt() * clean + (1 - a).sqrt() * noise
        loss = F.mse_loss(model(noisy, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        running += loss.detach()
    dist.all_reduce(running, op=dist.ReduceOp.SUM)
    mean = running.item() / dist.get_world_size() / cfg.steps_per_segment
    if rank == 0:
        print(f"segment {segment} finished at step {step}: loss {mean:.4f}", flush=True)
    ckpt.save(model, optimizer, step)


def main():
    cfg = Config()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed + rank)
    shard = make_shard(rank, world)
    ckpt = Checkpointer(cfg.folder, rank)
    for segment in range(cfg.segments):
        train_segment(cfg, segment, shard, ckpt, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
