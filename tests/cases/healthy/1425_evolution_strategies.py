"""OpenAI-style evolution strategies: processes share seeds and scores, never gradients."""
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class PointMass:
    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.pos, self.goal = torch.tensor(rng.normal(size=2)).float(), torch.tensor(rng.normal(size=2)).float()

    def rollout(self, policy, steps=12):
        total, pos = 0.0, self.pos.clone()
        for _ in range(steps):
            pos = pos + 0.3 * torch.tanh(policy(torch.cat([pos, self.goal])))
            total -= (pos - self.goal).norm().item()
        return total / steps


def score(policy, theta, episode_seeds):
    vector_to_parameters(theta, policy.parameters())
    return float(np.mean([PointMass(s).rollout(policy) for s in episode_seeds]))


def noise(seed, n):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def main(generations=25, pairs_per_rank=6, sigma=0.1, lr=0.1):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)).requires_grad_(False)
    theta = parameters_to_vector(policy.parameters()).clone()
    velocity = torch.zeros_like(theta)

    for generation in range(generations):
        episodes = [generation * 100 + k for k in range(3)]
        mine = torch.zeros(pairs_per_rank, 3, dtype=torch.float64)
        for k in range(pairs_per_rank):
            seed = (generation * world + rank) * pairs_per_rank + k
            eps = noise(seed, theta.numel())
            mine[k] = torch.tensor([seed, score(policy, theta + sigma * eps, episodes), score(policy, theta - sigma * eps, episodes)])
        everyone = [torch.zeros_like(mine) for _ in range(world)]
        dist.all_gather(everyone, mine)
        table = torch.cat(everyone)
        returns = table[:, 1:]
        ranks = returns.flatten().argsort().argsort().double().view_as(returns)
        shaped = ranks / (returns.numel() - 1) - 0.5
        gradient = torch.zeros_like(theta)
        for (seed, _, _), (up, down) in zip(table.tolist(), shaped.tolist()):
            gradient += (up - down) * noise(int(seed), theta.numel())
        gradient /= returns.numel() * sigma
        velocity.mul_(0.8).add_(gradient)
        theta += lr * velocity * sigma
        if rank == 0 and generation % 5 == 0:
            print(f"generation {generation}: mean return {returns.mean().item():.3f}")
    vector_to_parameters(theta, policy.parameters())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
