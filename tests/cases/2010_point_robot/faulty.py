"""Policy gradient for a point robot that must reach the origin. Each worker has its own arenas; gradients are averaged by hand."""
import os
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


@dataclass
class Config:
    workers: int = 2
    robots: int = 64
    horizon: int = 12
    updates: int = 60
    lr: float = 3e-3
    noise: float = 0.3
    seed: int = 0


class Arena:
    """Positions and speeds in two dimensions; arenas with an odd number are wider."""

    def __init__(self, number, robots):
        self.gen = torch.Generator().manual_seed(900 + number)
        self.robots, self.width = robots, 1.0 + 2.0 * (number % 2)

    def reset(self):
        place = self.width * (2 * torch.rand(self.robots, 2, generator=self.gen) - 1)
        self.state = torch.cat([place, torch.zeros(self.robots, 2)], 1)
        return self.state

    def step(self, push):
        speed = 0.8 * self.state[:, 2:] + 0.3 * push.clamp(-1, 1)
        self.state = torch.cat([self.state[:, :2] + 0.5 * speed, speed], 1)
        return self.state, -self.state[:, :2].norm(dim=1)


class RunningNorm:
    """Observations are shifted and scaled by what was seen so far."""

    def __init__(self, size):
        self.n, self.total, self.square = torch.zeros(1), torch.zeros(size), torch.zeros(size)

    def update(self, batch):
        fresh = torch.cat([torch.tensor([float(len(batch))]), batch.sum(0), batch.pow(2).sum(0)])
        self.n += fresh[0]
        self.total += fresh[1 : 1 + batch.shape[1]]
        self.square += fresh[1 + batch.shape[1] :]

    def __call__(self, obs):
        mean = self.total / self.n
        std = (self.square / self.n - mean**2).clamp(min=1e-4).sqrt()
        return ((obs - mean) / std).clamp(-5, 5)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, obs):
        return self.body(obs)


def rollouts(cfg, arena, norm, policy, gen):
    while True:
        obs, seen, pushes, rewards = arena.reset(), [], [], []
        for _ in range(cfg.horizon):
            norm.update(obs)
            scaled = norm(obs)
            with torch.no_grad():
                mean = policy(scaled)
            push = mean + cfg.noise * torch.randn(mean.shape, generator=gen)
            obs, reward = arena.step(push)
            seen.append(scaled), pushes.append(push), rewards.append(reward)
        rewards = torch.stack(rewards)
        returns = rewards.flip(0).cumsum(0).flip(0)
        yield torch.stack(seen), torch.stack(pushes), returns, rewards.mean()


def average_gradients(policy):
    flat = torch.cat([p.grad.flatten() for p in policy.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    at = 0
    for p in policy.parameters():
        p.grad.copy_(flat[at : at + p.numel()].view_as(p))
        at += p.numel()


def worker(rank, cfg, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=cfg.workers)
    torch.manual_seed(cfg.seed)
    policy, norm = Policy(), RunningNorm(4)
    opt = torch.optim.Adam(policy.parameters(), lr=cfg.lr)
    gen = torch.Generator().manual_seed(40 + rank)
    source = rollouts(cfg, Arena(rank, cfg.robots), norm, policy, gen)

    for update, (obs, push, returns, reward) in zip(range(cfg.updates), source):
        advantage = returns - returns.mean(1, keepdim=True)
        advantage = advantage / (advantage.std() + 1e-6)
        log_prob = -((push - policy(obs)) ** 2).sum(-1) / (2 * cfg.noise**2)
        loss = -(log_prob * advantage).mean()
        opt.zero_grad()
        loss.backward()
        average_gradients(policy)
        opt.step()
        if update % 10 == 9:
            dist.all_reduce(reward)
            if rank == 0:
                print(f"update {update + 1:3d}: mean reward {reward.item() / cfg.workers:.3f}", flush=True)
    if rank == 0:
        torch.save({"policy": policy.state_dict(), "norm": (norm.n, norm.total, norm.square)}, "robot.pt")
    dist.barrier()
    dist.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    config = Config()
    mp.spawn(worker, args=(config, free_port()), nprocs=config.workers)
