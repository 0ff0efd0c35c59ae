"""OpenAI-style evolution strategies: no backward at all; ranks try mirrored perturbations from a shared noise table and exchange scores."""
import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn


class SharedNoiseTable:
    def __init__(self, size=200_000, seed=123):
        self.noise = torch.from_numpy(np.random.RandomState(seed).randn(size).astype(np.float32))

    def get(self, i, dim):
        return self.noise[i : i + dim]

    def sample_index(self, rng, dim):
        return rng.randint(0, len(self.noise) - dim + 1)


class Pendulum:
    def __init__(self, rng):
        self.rng = rng

    def rollout(self, policy, steps=60):
        th, om, total = self.rng.uniform(-0.4, 0.4), 0.0, 0.0
        for _ in range(steps):
            o = torch.tensor([np.sin(th), np.cos(th), om], dtype=torch.float32)
            u = float(policy(o).clamp(-2, 2))
            om += 0.05 * (9.8 * np.sin(th) + 4 * u)
            th += 0.05 * om
            total += np.exp(-th * th)
            if abs(th) > 1.5:
                break
        return total


def set_flat(policy, flat):
    torch.nn.utils.vector_to_parameters(flat, policy.parameters())


def compute_centered_ranks(x):
    ranks = np.empty(x.size, dtype=np.float32)
    ranks[x.ravel().argsort()] = np.arange(x.size)
    return (ranks / (x.size - 1) - 0.5).reshape(x.shape)


@torch.no_grad()
def main():
    p = argparse.ArgumentParser()
    p.add_argument("--generations", type=int, default=25)
    p.add_argument("--pairs", type=int, default=6, help="per process")
    p.add_argument("--sigma", type=float, default=0.1)
    p.add_argument("--lr", type=float, default=0.05)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 1))
    theta = torch.nn.utils.parameters_to_vector(policy.parameters()).clone()
    theta_param = nn.Parameter(theta.clone())
    optimizer = torch.optim.Adam([theta_param], lr=args.lr)
    noise = SharedNoiseTable()
    rng = np.random.RandomState(7 + rank)
    env = Pendulum(rng)
    for gen in range(args.generations):
        results = np.zeros((args.pairs, 3))
        for k in range(args.pairs):
            idx = noise.sample_index(rng, theta.numel())
            eps = noise.get(idx, theta.numel())
            set_flat(policy, theta_param + args.sigma * eps)
            plus = env.rollout(policy)
            set_flat(policy, theta_param - args.sigma * eps)
            results[k] = idx, plus, env.rollout(policy)
        mine = torch.from_numpy(results)
        gathered = [torch.zeros_like(mine) for _ in range(world)]
        dist.all_gather(gathered, mine)
        table = torch.cat(gathered).numpy()
        scores = compute_centered_ranks(table[:, 1:])
        grad = torch.zeros_like(theta)
        for (idx, _, _), (a, b) in zip(table, scores):
            grad += float(a - b) * noise.get(int(idx), len(theta))
        grad /= len(table) * 2 * args.sigma
        theta_param.grad = -grad + 0.005 * theta_param
        optimizer.step()
        if rank == 0 and gen % 5 == 0:
            print(f"generation {gen}: mean return {table[:, 1:].mean():.2f} best {table[:, 1:].max():.2f}")
    set_flat(policy, theta_param)
    if rank == 0:
        torch.save(policy.state_dict(), f"/tmp/es_{os.getpid()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
