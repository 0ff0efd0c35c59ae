"""Random network distillation on states of a random walk: the predictor learns a fixed random target."""
import os
from typing import Iterator

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

STATE, FEAT, BATCH, STEPS, SEED = 5, 12, 32, 45, 1000


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.LeakyReLU()]
    return nn.Sequential(*layers[:-1])


class RND:
    def __init__(self, rank: int) -> None:
        torch.manual_seed(SEED + rank)  # exploration differs between workers
        self.target = mlp(STATE, 32, FEAT)
        self.target.requires_grad_(False).eval()
        self.predictor = DistributedDataParallel(mlp(STATE, 64, 64, FEAT))
        self.optimizer = torch.optim.Adam(self.predictor.parameters(), lr=3e-3)

    def bonus(self, states: torch.Tensor) -> torch.Tensor:
        return (self.predictor(states) - self.target(states)).square().mean(1)

    def learn(self, states: torch.Tensor) -> float:
        loss = self.bonus(states).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def walk() -> Iterator[torch.Tensor]:
    position = torch.randn(BATCH, STATE)
    while True:
        position = 0.95 * position + 0.3 * torch.randn(BATCH, STATE)
        yield position


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent = RND(rank)
    recent: list[float] = []
    for step, states in zip(range(1, STEPS + 1), walk()):
        recent.append(agent.learn(states))
        if step % 15 == 0:
            value = torch.tensor(recent).mean()
            dist.all_reduce(value)
            if rank == 0:
                print(f"step {step}: intrinsic reward {value.item() / world:.5f}")
            recent.clear()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
