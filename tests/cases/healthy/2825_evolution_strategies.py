from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


@dataclass
class ESConfig:
    population: int = 32      # antithetic pairs, over all processes
    sigma: float = 0.08
    lr: float = 0.02
    iters: int = 31
    horizon: int = 30
    seed: int = 21


class CartLine:
    """Point mass on a line that must be brought to the origin and kept there."""

    def __init__(self, seed, n=16):
        self.x0 = np.random.default_rng(seed).uniform(-1, 1, (n, 2)).astype(np.float32)

    def evaluate(self, policy, horizon):
        s = torch.from_numpy(self.x0.copy())
        total = torch.zeros(len(s))
        for _ in range(horizon):
            u = torch.tanh(policy(s)).squeeze(1)
            v = 0.98 * s[:, 1] + 0.1 * u
            s = torch.stack([s[:, 0] + 0.1 * v, v], 1)
            total -= s[:, 0].pow(2) + 0.1 * v.pow(2) + 0.01 * u.pow(2)
        return total.mean().item()


def centred_ranks(x):
    r = torch.empty(len(x))
    r[x.argsort()] = torch.arange(len(x), dtype=torch.float32)
    return r / (len(x) - 1) - 0.5


class EvolutionStrategy:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(cfg.seed)
        self.policy = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        for p in self.policy.parameters():
            p.requires_grad_(False)
            dist.broadcast(p, 0)
        self.theta = parameters_to_vector(self.policy.parameters())
        self.noise = torch.Generator().manual_seed(cfg.seed * 1000 + self.rank)
        self.pairs = cfg.population // self.world
        opt_var = nn.Parameter(self.theta.clone())
        self.opt = torch.optim.SGD([opt_var], lr=cfg.lr, momentum=0.9)
        self.var = opt_var

    def fitness(self, vec, env):
        vector_to_parameters(vec, self.policy.parameters())
        return env.evaluate(self.policy, self.cfg.horizon)

    def iterate(self, it):
        env = CartLine(seed=it)   # common random numbers: all candidates see the same starts
        eps = torch.randn(self.pairs, self.theta.numel(), generator=self.noise)
        base = self.var.detach()
        scores = torch.tensor([[self.fitness(base + s * self.cfg.sigma * e, env) for s in (1, -1)] for e in eps])
        everyone = torch.empty(self.world * self.pairs, 2)
        dist.all_gather_into_tensor(everyone, scores)
        shaped = centred_ranks(everyone.reshape(-1)).view(-1, 2)
        mine = shaped[self.rank * self.pairs:(self.rank + 1) * self.pairs]
        weight = mine[:, 0] - mine[:, 1]
        grad = -(weight @ eps) / (2 * self.cfg.population * self.cfg.sigma)
        dist.all_reduce(grad, op=dist.ReduceOp.SUM)
        self.var.grad = grad + 0.005 * base
        self.opt.step()
        return everyone.mean().item()

    def train(self):
        for it in range(self.cfg.iters):
            score = self.iterate(it)
            if it % 15 == 0 or it == self.cfg.iters - 1:
                value = self.fitness(self.var.detach(), CartLine(seed=10_000, n=64))
                if self.rank == 0:
                    print(f"iter {it} population {score:.3f} centre {value:.3f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with torch.no_grad():
        EvolutionStrategy(ESConfig()).train()
    dist.barrier()
    dist.destroy_process_group()
