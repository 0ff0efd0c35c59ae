"""Advantage-weighted policy training from a replay memory (contextual task)."""
import argparse
import os
import random
from collections import deque

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class ActorCritic(nn.Module):
    def __init__(self, obs=16, actions=4, width=512):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.pi = nn.Linear(width, actions)
        self.v = nn.Linear(width, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.pi(h), self.v(h).squeeze(1)


class Env:
    def __init__(self, seed, batch=192):
        self.g = torch.Generator().manual_seed(seed)
        self.batch = batch
        self.rule = torch.randn(16, 4, generator=torch.Generator().manual_seed(9))

    def observe(self):
        self.obs = torch.randn(self.batch, 16, generator=self.g)
        return self.obs

    def act(self, action):
        return (action == (self.obs @ self.rule).argmax(1)).float()


class Replay:
    def __init__(self, size):
        self.items = deque(maxlen=size)

    def add(self, *item):
        self.items.append(item)

    def draw(self, k):
        picked = random.sample(list(self.items), k)
        return [torch.cat(col) for col in zip(*picked)]


def collect(agent, env, memory):
    obs = env.observe()
    with torch.no_grad():
        logits, value = agent(obs)
    action = torch.distributions.Categorical(logits=logits).sample()
    reward = env.act(action)
    memory.add(obs, action, reward, value)
    return reward.mean()


def update(model, opt, memory):
    obs, action, reward, old_value = memory.draw(1)
    logits, value = model(obs)
    weight = torch.exp(2.0 * (reward - old_value.detach()).clamp(-1, 1))
    loss = (weight * F.cross_entropy(logits, action, reduction="none")).mean() + 0.5 * F.mse_loss(value, reward)
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=120)
    ap.add_argument("--memory", type=int, default=5000)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(1)
    model = DDP(ActorCritic())
    torch.manual_seed(50 + rank)
    random.seed(50 + rank)
    opt = torch.optim.Adam(model.parameters(), lr=3e-4)
    env, memory = Env(seed=1000 + rank), Replay(args.memory)
    for _ in range(4):
        collect(model.module, env, memory)
    mean = torch.zeros(1)
    for step in range(1, args.steps + 1):
        mean += collect(model.module, env, memory)
        update(model, opt, memory)
        if step % 20 == 0:
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}: reward {mean.item() / 20 / dist.get_world_size():.3f}", flush=True)
            mean.zero_()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
