"""Distributed DQN on a corridor environment (every rank has its own environment)."""
import argparse
import collections
import copy
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Corridor:
    """Walk right to the goal; a slip moves the walker left."""

    def __init__(self, length, seed):
        self.length, self.rng = length, random.Random(seed)

    def reset(self):
        self.pos, self.t = 0, 0
        return self.obs()

    def obs(self):
        return torch.nn.functional.one_hot(torch.tensor(self.pos), self.length).float()

    def step(self, action):
        self.t += 1
        move = 1 if action == 1 and self.rng.random() > 0.2 else -1
        self.pos = max(0, min(self.length - 1, self.pos + move))
        done = self.pos == self.length - 1 or self.t >= 25
        return self.obs(), float(self.pos == self.length - 1), done


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=160)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--gamma", type=float, default=0.95)
    ap.add_argument("--refresh", type=int, default=20)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    rng = random.Random(100 + rank)
    env = Corridor(8, 200 + rank)
    q = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)))
    target = copy.deepcopy(q.module).requires_grad_(False)
    opt = torch.optim.Adam(q.parameters(), lr=5e-3)
    memory = collections.deque(maxlen=500)
    obs, episodes, wins = env.reset(), 0, 0.0

    for step in range(args.steps):
        with torch.no_grad():
            greedy = q.module(obs).argmax().item()
        action = rng.randrange(2) if rng.random() < max(0.1, 1 - step / 80) else greedy
        nxt, reward, done = env.step(action)
        memory.append((obs, action, reward, nxt, float(done)))
        obs = env.reset() if done else nxt
        episodes, wins = episodes + done, wins + reward
        if step % args.refresh == 0:
            target.load_state_dict(q.module.state_dict())
        if len(memory) < args.batch:
            continue
        s, a, r, n, d = zip(*rng.sample(list(memory), args.batch))
        s, n, a = torch.stack(s), torch.stack(n), torch.tensor(a)
        with torch.no_grad():
            y = torch.tensor(r) + args.gamma * (1 - torch.tensor(d)) * target(n).amax(1)
        loss = nn.functional.smooth_l1_loss(q(s).gather(1, a[:, None]).squeeze(1), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if (step + 1) % 40 == 0:
            stat = torch.tensor([wins, float(episodes)])
            dist.all_reduce(stat)
            if rank == 0:
                print(f"step {step + 1}: {stat[0]:.0f} wins in {stat[1]:.0f} episodes of {world} actors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
