"""Policy regression with ZeRO-style optimizer shards: every process saves the part of the state that it owns."""
import datetime as dt
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class TrainConfig:
    job_name: str = "policy"
    output_dir: Path = field(default=None)
    steps: int = 60
    save_every: int = 20
    batch_size: int = 32
    lr: float = 1e-3
    seed: int = 11

    def validate(self):
        if self.output_dir is None:
            now = dt.datetime.now()
            self.output_dir = Path("outputs/train") / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S-%f}_{self.job_name}"
        if self.steps % self.save_every:
            raise ValueError("steps must be a multiple of save_every")


class Policy(nn.Module):
    def __init__(self, obs=18, act=6):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, act))

    def forward(self, obs):
        return self.net(obs)


class Demonstrations:
    def __init__(self, rank, world, n=3000):
        g = torch.Generator().manual_seed(77)
        obs = torch.randn(n, 18, generator=g)
        act = torch.tanh(obs @ torch.randn(18, 6, generator=g) * 0.4)
        self.obs, self.act = obs[rank::world], act[rank::world]

    def draw(self, k):
        rows = torch.randint(0, len(self.obs), (k,))
        return self.obs[rows], self.act[rows]


def save_checkpoint(cfg, step, model, optimizer, rank):
    folder = cfg.output_dir / f"step_{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(optimizer.optim.state_dict(), folder / f"zero_rank_{rank}_optim_states.pt")
    torch.save(torch.get_rng_state(), folder / f"random_states_{rank}.pt")
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "step": step}, folder / "model.pt")
    dist.barrier()


def train(cfg):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed + rank)
    data = Demonstrations(rank, world)
    model = DDP(Policy())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=cfg.lr)
    window = torch.zeros(1)
    for step in range(1, cfg.steps + 1):
        obs, act = data.draw(cfg.batch_size)
        loss = nn.functional.mse_loss(model(obs), act)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        window += loss.detach()
        if step % cfg.save_every == 0:
            dist.all_reduce(window)
            if rank == 0:
                print(f"step {step} loss {window.item() / cfg.save_every / world:.4f}", flush=True)
            window.zero_()
            save_checkpoint(cfg, step, model, optimizer, rank)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cfg = TrainConfig()
    cfg.validate()
    if dist.get_rank() == 0:
        print(f"writing to {cfg.output_dir}")
    train(cfg)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
