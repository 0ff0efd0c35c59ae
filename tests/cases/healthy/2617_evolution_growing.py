"""Evolution strategy on a balancing task; the population grows, each rank tries its share of the perturbations."""
import argparse
import json

import numpy as np
import torch
import torch.distributed as dist


class Pendulum:
    """Many pendulums at once."""

    def __init__(self, n, gen):
        self.th = (torch.rand(n, generator=gen) * 2 - 1) * 0.5
        self.om = (torch.rand(n, generator=gen) * 2 - 1) * 0.5

    def obs(self):
        return torch.stack([self.th.cos(), self.th.sin(), self.om / 4], -1)

    def step(self, u):
        u = u.clamp(-1, 1) * 3
        angle = (self.th + np.pi) % (2 * np.pi) - np.pi
        cost = angle ** 2 + 0.1 * self.om ** 2 + 0.001 * u ** 2
        self.om = (self.om + 0.05 * (15 * self.th.sin() + 3 * u)).clamp(-8, 8)
        self.th = self.th + 0.05 * self.om
        return -cost


SHAPES = [(3, 16), (16,), (16, 1), (1,)]
SIZE = sum(int(np.prod(s)) for s in SHAPES)


def act(theta, obs):
    parts, k = [], 0
    for s in SHAPES:
        n = int(np.prod(s))
        parts.append(theta[k:k + n].view(s))
        k += n
    h = torch.tanh(obs @ parts[0] + parts[1])
    return torch.tanh(h @ parts[2] + parts[3]).squeeze(-1)


def rollout(theta, seed, starts=8, steps=60):
    env = Pendulum(starts, torch.Generator().manual_seed(seed))
    total = 0.0
    for _ in range(steps):
        total += env.step(act(theta, env.obs())).mean().item()
    return total / steps


def noise(generation, member):
    g = torch.Generator().manual_seed(generation * 100_003 + member)
    return torch.randn(SIZE, generator=g)


def centred_ranks(x):
    r = torch.empty(x.numel())
    r[x.flatten().argsort()] = torch.arange(x.numel(), dtype=torch.float32)
    return (r / (x.numel() - 1) - 0.5).view_as(x)


class Archive:
    """The best points found; a bounded list kept alike on all ranks."""

    def __init__(self, keep=32):
        self.keep, self.items = keep, []

    def add(self, score, generation):
        self.items.append((score, generation))
        self.items.sort(reverse=True)
        del self.items[self.keep:]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--generations", type=int, default=18)
    ap.add_argument("--sigma", type=float, default=0.3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    rank, world = dist.get_rank(), dist.get_world_size()
    theta = torch.zeros(SIZE)
    if rank == 0:
        theta = torch.randn(SIZE, generator=torch.Generator().manual_seed(6)) * 0.3
    dist.broadcast(theta, src=0)
    theta = torch.nn.Parameter(theta)
    opt = torch.optim.Adam([theta], lr=0.08)
    archive, population = Archive(), 9
    history = []
    for generation in range(args.generations):
        members = list(range(rank, population, world))
        scores = torch.zeros(population, 2)
        for m in members:
            eps = args.sigma * noise(generation, m)
            scores[m, 0] = rollout(theta + eps, seed=generation)
            scores[m, 1] = rollout(theta - eps, seed=generation)
        dist.all_reduce(scores)
        shaped = centred_ranks(scores)
        weight = shaped[:, 0] - shaped[:, 1]
        grad = torch.zeros(SIZE)
        for m in members:
            grad -= weight[m] * noise(generation, m)
        dist.all_reduce(grad)
        theta.grad = grad / (2 * population * args.sigma)
        opt.step()
        centre = torch.tensor([rollout(theta, seed=10_000 + k) for k in range(rank, 6, world)])
        parts = [None] * world
        dist.all_gather_object(parts, centre)
        score = torch.cat(parts).mean().item()
        archive.add(score, generation)
        history.append(score)
        if (generation + 1) % 6 == 0:
            population += 6
            if rank == 0:
                print(f"generation {generation + 1} return {score:.3f} best {archive.items[0]} population {population}", flush=True)
    if rank == 0:
        torch.save(theta.data, "policy.pt")
        with open("history.json", "w") as f:
            json.dump(history, f)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
