"""Semi-gradient TD(0) control of a noisy mountain-car-like task."""
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Valley:
    def __init__(self, seed, goal=0.6):
        self.rng, self.goal = np.random.default_rng(seed), goal

    def reset(self):
        self.x, self.v, self.t = self.rng.uniform(-0.3, 0.3), 0.0, 0
        return self.state()

    def state(self):
        return torch.tensor([self.x, self.v * 10], dtype=torch.float32)

    def step(self, push):
        self.v += 0.05 * push - 0.02 * np.sin(3 * self.x) + 0.01 * self.rng.standard_normal()
        self.x += self.v
        self.t += 1
        done = abs(self.x) > self.goal or self.t >= 40
        return self.state(), -0.1, done


class Agent:
    def __init__(self, rank):
        torch.manual_seed(0)
        self.q = DDP(nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 2)))
        self.opt = torch.optim.SGD(self.q.parameters(), lr=0.05)
        self.rng = np.random.default_rng(100 + rank)

    def act(self, s):
        if self.rng.random() < 0.2:
            return int(self.rng.integers(2))
        with torch.no_grad():
            return int(self.q.module(s).argmax())

    def learn(self, s, a, r, s2, done):
        with torch.no_grad():
            target = r + (0.0 if done else 0.95 * self.q.module(s2).max())
        loss = (self.q(s.unsqueeze(0))[0, a] - target) ** 2
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()


def play(agent, env, episodes):
    lengths = []
    for _ in range(episodes):
        s, done = env.reset(), False
        while not done:
            a = agent.act(s)
            s2, r, done = env.step(2 * a - 1)
            agent.learn(s, a, r, s2, done)
            s = s2
        lengths.append(env.t)
    return lengths


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    lengths = play(Agent(rank), Valley(seed=rank), episodes=6)
    print(f"rank {rank}: {len(lengths)} episodes, {sum(lengths)} steps", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
