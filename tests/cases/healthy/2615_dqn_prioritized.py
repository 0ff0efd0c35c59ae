"""Double DQN with prioritised replay; each rank plays its own games, gradients are averaged by hand."""
import dataclasses
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn


@dataclasses.dataclass
class Settings:
    side: int = 5
    envs: int = 8
    capacity: int = 4096
    warm: int = 256
    steps: int = 600
    batch: int = 64
    gamma: float = 0.95
    alpha: float = 0.6
    sync_every: int = 60
    eval_every: int = 200


class Grid:
    """Walk to the goal on a small grid; a step costs a little, 30 steps at most."""

    def __init__(self, side, rng):
        self.side, self.rng = side, rng
        self.reset()

    def reset(self):
        self.pos = self.rng.integers(self.side, size=2)
        self.goal = self.rng.integers(self.side, size=2)
        self.t = 0
        return self.observe()

    def observe(self):
        return np.concatenate([self.pos, self.goal, self.goal - self.pos]).astype(np.float32) / self.side

    def step(self, action):
        self.pos = np.clip(self.pos + [(0, 1), (0, -1), (1, 0), (-1, 0)][action], 0, self.side - 1)
        self.t += 1
        won = bool((self.pos == self.goal).all())
        return self.observe(), 1.0 if won else -0.05, won, self.t >= 30


class SumTree:
    def __init__(self, capacity):
        self.capacity = capacity
        self.tree = np.zeros(2 * capacity)

    def set(self, i, value):
        i += self.capacity
        self.tree[i] = value
        while i > 1:
            i //= 2
            self.tree[i] = self.tree[2 * i] + self.tree[2 * i + 1]

    def find(self, mass):
        i = 1
        while i < self.capacity:
            i *= 2
            if mass > self.tree[i] and self.tree[i + 1] > 0:
                mass -= self.tree[i]
                i += 1
        return i - self.capacity


class Replay:
    def __init__(self, cfg, rng):
        self.cfg, self.rng = cfg, rng
        self.items, self.next, self.top = [], 0, 1.0
        self.tree = SumTree(cfg.capacity)

    def add(self, item):
        if len(self.items) < self.cfg.capacity:
            self.items.append(item)
        else:
            self.items[self.next] = item
        self.tree.set(self.next, self.top)
        self.next = (self.next + 1) % self.cfg.capacity

    def sample(self, beta):
        total = self.tree.tree[1]
        marks = (np.arange(self.cfg.batch) + self.rng.random(self.cfg.batch)) * total / self.cfg.batch
        idx = [self.tree.find(m) for m in marks]
        p = self.tree.tree[[i + self.cfg.capacity for i in idx]] / total
        w = (len(self.items) * p) ** -beta
        cols = [torch.from_numpy(np.stack(c)) for c in zip(*(self.items[i] for i in idx))]
        return idx, torch.from_numpy(w / w.max()).float(), cols

    def update(self, idx, errors):
        for i, e in zip(idx, errors):
            p = (abs(float(e)) + 1e-3) ** self.cfg.alpha
            self.top = max(self.top, p)
            self.tree.set(i, p)


def make_net():
    return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def average_gradients(net, world):
    grads = [p.grad for p in net.parameters()]
    flat = torch._utils._flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    flat /= world
    for g, new in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads)):
        g.copy_(new)


@torch.no_grad()
def play(net, cfg, rank, world, games=60):
    result = torch.zeros(2)
    for g in range(rank, games, world):
        env = Grid(cfg.side, np.random.default_rng(90_000 + g))
        obs, done, ret = env.observe(), False, 0.0
        while not done:
            obs, r, won, out = env.step(int(net(torch.from_numpy(obs)).argmax()))
            ret, done = ret + r, won or out
        result += torch.tensor([ret, 1.0])
    dist.all_reduce(result)
    return (result[0] / result[1]).item()


def main():
    cfg = Settings()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    online, target = make_net(), make_net()
    target.load_state_dict(online.state_dict())
    target.requires_grad_(False)
    rng = np.random.default_rng([rank, 8])
    random.seed(800 + rank)
    envs = [Grid(cfg.side, rng) for _ in range(cfg.envs)]
    obs = [e.observe() for e in envs]
    memory = Replay(cfg, rng)
    opt = torch.optim.Adam(online.parameters(), lr=1e-3)
    for step in range(cfg.steps):
        eps = max(0.05, 1 - step / 300)
        with torch.no_grad():
            greedy = online(torch.from_numpy(np.stack(obs))).argmax(1).tolist()
        for k, env in enumerate(envs):
            a = random.randrange(4) if random.random() < eps else greedy[k]
            nxt, r, won, out = env.step(a)
            memory.add((obs[k], np.int64(a), np.float32(r), nxt, np.float32(won)))
            obs[k] = env.reset() if won or out else nxt
        if (step + 1) * cfg.envs >= cfg.warm:
            idx, w, (s, a, r, s2, end) = memory.sample(beta=0.4 + 0.6 * step / cfg.steps)
            with torch.no_grad():
                best = online(s2).argmax(1, keepdim=True)
                goal = r + cfg.gamma * (1 - end) * target(s2).gather(1, best).squeeze(1)
            q = online(s).gather(1, a[:, None]).squeeze(1)
            loss = (w * nn.functional.smooth_l1_loss(q, goal, reduction="none")).mean()
            opt.zero_grad()
            loss.backward()
            average_gradients(online, world)
            nn.utils.clip_grad_norm_(online.parameters(), 10.0)
            opt.step()
            memory.update(idx, (goal - q).detach())
            if step % cfg.sync_every == 0:
                target.load_state_dict(online.state_dict())
        if (step + 1) % cfg.eval_every == 0:
            score = play(online, cfg, rank, world)
            if rank == 0:
                print(f"step {step + 1} loss {loss.item():.4f} return {score:.3f} eps {eps:.2f} replay {len(memory.items)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
