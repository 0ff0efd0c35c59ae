"""Evolution strategies: ranks try other perturbations and exchange only scores, the noise is rebuilt from its seed."""
import argparse

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: imported later, its default arguments keep the group alive until exit
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class Pendulum:
    """Keep a linearised inverted pendulum upright; a whole batch of starts at once."""

    def __init__(self, starts, horizon=40):
        self.starts, self.horizon = starts, horizon

    def episode(self, policy):
        angle, speed = self.starts.unbind(-1)
        cost = torch.zeros(len(angle))
        for _ in range(self.horizon):
            force = 3 * torch.tanh(policy(torch.stack([angle, speed], -1)).squeeze(-1))
            speed = (speed + 0.1 * (2 * torch.sin(angle) + force)).clamp(-4, 4)
            angle = angle + 0.1 * speed
            cost += angle.square() + 0.1 * speed.square() + 0.01 * force.square()
        return -cost.clamp(max=400).mean().item()


def noise_for(generation, member, size):
    gen = torch.Generator().manual_seed(generation * 10_000 + member)
    return torch.randn(size, generator=gen)


def centered_ranks(scores):
    ranks = torch.empty_like(scores)
    ranks[scores.argsort()] = torch.arange(len(scores), dtype=scores.dtype)
    return ranks / (len(scores) - 1) - 0.5


class EvolutionStrategy:
    def __init__(self, policy, args, rank, world):
        self.policy, self.args, self.rank, self.world = policy, args, rank, world
        self.center = nn.Parameter(parameters_to_vector(policy.parameters()).detach().clone())
        self.optimizer = torch.optim.Adam([self.center], lr=args.lr)
        self.members = list(range(rank, args.pairs, world))  # my share of the mirrored pairs

    @torch.no_grad()
    def score(self, vector, env):
        vector_to_parameters(vector.clone(), self.policy.parameters())
        return env.episode(self.policy)

    def generation(self, index):
        # all members of a generation meet the same starts
        gen = torch.Generator().manual_seed(77_000 + index)
        env = Pendulum(0.6 * torch.randn(16, 2, generator=gen))
        size, sigma = self.center.numel(), self.args.sigma
        mine = []
        for member in self.members:
            eps = noise_for(index, member, size)
            mine.append([self.score(self.center.detach() + sigma * eps, env),
                         self.score(self.center.detach() - sigma * eps, env)])
        mine = torch.tensor(mine)
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine)
        scores = torch.empty(self.args.pairs, 2)
        for r, part in enumerate(parts):
            scores[r::self.world] = part
        shaped = centered_ranks(scores.flatten()).view_as(scores)
        step = torch.zeros(size)
        for member in range(self.args.pairs):  # everyone rebuilds everyone's noise
            step += (shaped[member, 0] - shaped[member, 1]) * noise_for(index, member, size)
        self.center.grad = -step / (2 * self.args.pairs * sigma)
        self.optimizer.step()
        return scores.mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--generations", type=int, default=35)
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--sigma", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert args.pairs % world == 0
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1)).requires_grad_(False)
    es = EvolutionStrategy(policy, args, rank, world)
    for index in range(args.generations):
        mean_score = es.generation(index)
        if rank == 0 and index % 5 == 4:
            print(f"generation {index}: mean score {mean_score:.3f}", flush=True)
    if rank == 0:
        vector_to_parameters(es.center.detach().clone(), policy.parameters())
        torch.save(policy.state_dict(), "policy.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
