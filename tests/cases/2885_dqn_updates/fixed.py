"""Double DQN on a corridor; each process runs its own environment and replay memory."""
import argparse
import collections
import copy
import datetime
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

Transition = collections.namedtuple("Transition", "s a r s2 done")


class Corridor:
    """Reach the right end; wind pushes back at random."""

    def __init__(self, length, rng):
        self.length, self.rng = length, rng

    def reset(self):
        self.pos, self.t = int(self.rng.integers(0, self.length // 2)), 0
        return self.obs()

    def obs(self):
        o = np.zeros(self.length, dtype=np.float32)
        o[self.pos] = 1.0
        return o

    def step(self, action):
        move = 1 if action == 1 else -1
        if self.rng.random() < 0.2:
            move = -move
        self.pos = min(max(self.pos + move, 0), self.length - 1)
        self.t += 1
        goal = self.pos == self.length - 1
        return self.obs(), (1.0 if goal else -0.02), goal, self.t >= 40


class Memory:
    def __init__(self, capacity, seed):
        self.data = collections.deque(maxlen=capacity)
        self.rng = random.Random(seed)

    def push(self, *row):
        self.data.append(Transition(*row))

    def sample(self, n):
        rows = [self.data[self.rng.randrange(len(self.data))] for _ in range(n)]
        s, a, r, s2, d = zip(*rows)
        return (torch.from_numpy(np.stack(s)), torch.tensor(a), torch.tensor(r),
                torch.from_numpy(np.stack(s2)), torch.tensor(d, dtype=torch.float32))


class Agent:
    def __init__(self, args, rank):
        torch.manual_seed(args.seed)
        net = nn.Sequential(nn.Linear(args.length, 64), nn.ReLU(), nn.Linear(64, 2))
        self.q = DDP(net)
        self.target = copy.deepcopy(net).requires_grad_(False)
        self.opt = torch.optim.Adam(self.q.parameters(), lr=args.lr)
        self.args, self.updates = args, 0
        self.rng = np.random.default_rng([args.seed, rank, 1])

    def act(self, obs, eps):
        if self.rng.random() < eps:
            return int(self.rng.integers(2))
        with torch.no_grad():
            return int(self.q.module(torch.from_numpy(obs)).argmax())

    def learn(self, batch):
        s, a, r, s2, done = batch
        with torch.no_grad():
            best = self.q.module(s2).argmax(-1, keepdim=True)
            nxt = self.target(s2).gather(-1, best).squeeze(-1)
            goal = r + self.args.gamma * (1 - done) * nxt
        pred = self.q(s).gather(-1, a[:, None]).squeeze(-1)
        loss = nn.functional.smooth_l1_loss(pred, goal)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.updates += 1
        if self.updates % self.args.target_every == 0:
            self.target.load_state_dict(self.q.module.state_dict())
        return loss.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--episodes", type=int, default=60)
    ap.add_argument("--updates-per-episode", type=int, default=16)
    ap.add_argument("--length", type=int, default=12)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--gamma", type=float, default=0.97)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--target-every", type=int, default=50)
    ap.add_argument("--seed", type=int, default=3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    rank = dist.get_rank()
    env = Corridor(args.length, np.random.default_rng([args.seed, rank, 0]))
    memory = Memory(4000, args.seed * 100 + rank)
    agent = Agent(args, rank)
    returns, losses = collections.deque(maxlen=20), collections.deque(maxlen=100)
    for episode in range(args.episodes):
        eps = max(0.05, 1.0 - episode / (0.6 * args.episodes))
        obs, total, over, length = env.reset(), 0.0, False, 0
        while not over:
            action = agent.act(obs, eps)
            nxt, reward, done, truncated = env.step(action)
            memory.push(obs, action, reward, nxt, done)
            obs, total, over, length = nxt, total + reward, done or truncated, length + 1
        returns.append(total)
        for _ in range(args.updates_per_episode):
            losses.append(agent.learn(memory.sample(args.batch)))
        if episode % 10 == 9 and rank == 0:
            print(f"episode {episode + 1} len {length} return {np.mean(returns):.3f} loss {np.mean(losses):.4f} "
                  f"updates {agent.updates}", flush=True)
    score = torch.tensor([float(np.mean(returns))])
    dist.all_reduce(score)
    if rank == 0:
        print(f"mean return over all workers {score.item() / dist.get_world_size():.3f}")
        torch.save(agent.q.module.state_dict(), "dqn.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
