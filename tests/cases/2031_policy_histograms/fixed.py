"""Actor-critic on a grid of corridors; rank 0 keeps histograms of all weights in a log file."""
import json
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass(frozen=True)
class Config:
    updates: int = 100
    envs: int = 48
    horizon: int = 6
    lr: float = 2e-3
    gamma: float = 0.9
    entropy: float = 0.01
    print_every: int = 20
    histogram_every: int = 50
    bins: int = 64


class Corridors:
    """Every environment wants to reach its goal cell on a line of 9; reward 1 there, -0.05 elsewhere."""

    def __init__(self, count, gen):
        self.count, self.gen = count, gen
        self.place = torch.randint(9, (count,), generator=gen)
        self.goal = torch.randint(9, (count,), generator=gen)

    def view(self):
        return torch.cat([F.one_hot(self.place, 9), F.one_hot(self.goal, 9)], 1).float()

    def act(self, action):
        self.place = (self.place + action - 1).clamp(0, 8)
        done = self.place == self.goal
        reward = torch.where(done, 1.0, -0.05)
        fresh_place = torch.randint(9, (self.count,), generator=self.gen)
        fresh_goal = torch.randint(9, (self.count,), generator=self.gen)
        self.place = torch.where(done, fresh_place, self.place)
        self.goal = torch.where(done, fresh_goal, self.goal)
        return reward, done.float()


class ActorCritic(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(18, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.policy, self.value = nn.Linear(width, 3), nn.Linear(width, 1)

    def forward(self, view):
        h = self.trunk(view)
        return self.policy(h), self.value(h).squeeze(-1)


class HistogramLog:
    def __init__(self, path, bins):
        self.file, self.bins = open(path, "w"), bins

    def write(self, step, model):
        for name, parameter in model.named_parameters():
            for kind, tensor in (("weight", parameter.detach()), ("gradient", parameter.grad)):
                edges = torch.linspace(tensor.min().item(), tensor.max().item() + 1e-9, self.bins + 1)
                slots = torch.bucketize(tensor.flatten(), edges[1:-1])
                counts = torch.bincount(slots, minlength=self.bins)
                order = tensor.flatten().sort().values
                marks = [order[int(q * (len(order) - 1))].item() for q in (0.01, 0.25, 0.5, 0.75, 0.99)]
                row = {"step": step, "name": name, "kind": kind, "counts": counts.tolist(), "quantiles": marks}
                self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())


def rollout(net, world, horizon, gen):
    views, actions, rewards, ends = [], [], [], []
    for _ in range(horizon):
        view = world.view()
        with torch.no_grad():
            probability = net(view)[0].softmax(1)
        action = torch.multinomial(probability, 1, generator=gen).squeeze(1)
        reward, done = world.act(action)
        views.append(view), actions.append(action), rewards.append(reward), ends.append(done)
    return torch.stack(views), torch.stack(actions), torch.stack(rewards), torch.stack(ends)


def main():
    config = Config()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    net = ActorCritic()
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    gen = torch.Generator().manual_seed(rank + 1)
    world = Corridors(config.envs, gen)
    histograms = HistogramLog("histograms.jsonl", config.bins) if rank == 0 else None

    for update in range(1, config.updates + 1):
        views, actions, rewards, ends = rollout(net, world, config.horizon, gen)
        with torch.no_grad():
            running = net(world.view())[1]
        returns = torch.empty_like(rewards)
        for t in reversed(range(config.horizon)):
            running = rewards[t] + config.gamma * (1 - ends[t]) * running
            returns[t] = running
        logits, values = model(views.flatten(0, 1))
        advantage = returns.flatten() - values
        spread = torch.distributions.Categorical(logits=logits)
        policy_loss = -(spread.log_prob(actions.flatten()) * advantage.detach()).mean()
        loss = policy_loss + 0.5 * advantage.pow(2).mean() - config.entropy * spread.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        if histograms and update % config.histogram_every == 0:
            histograms.write(update, net)
        optimizer.step()
        if update % config.print_every == 0:
            mean = rewards.mean()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"update {update:4d}  reward a step {mean.item() / world_size:.3f}", flush=True)
    if histograms:
        histograms.file.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
